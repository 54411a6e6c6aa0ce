"""Memory that attention over one large tree holds beyond its inputs and outputs, with and without context parallelism.

    python -m benchmarks.tree_attention_memory

One layer, forward and backward, float32, one thread a rank: a trunk of 16,384 rows with 8 answers of 512. The figure is
the peak resident memory over that before the forward pass, without the output and the gradients of query, key and
value. glibc gives every block of 64 KiB or more back when it is freed, so that no earlier memory is used again unseen.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

# The processes of the measurement read these when they start.
os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.logprobs import memory_mb
from relax_core.train.context_parallel import RowSharding
from relax_core.train.model.tree_attention import attention_over
from tests.trees import answers_tree

TRUNK, ANSWERS, ANSWER = 16_384, 8, 512
SHAPES = ((4, 4, 16), (8, 2, 64), (8, 8, 64))  # heads, key-value heads, head size
REACH_MIB = 64


def main() -> None:
    print(f"trunk {TRUNK:,}, {ANSWERS} × {ANSWER}, float32; at most {REACH_MIB} MiB wanted")
    for ranks in (1, 2):
        for shape in SHAPES:
            with tempfile.TemporaryDirectory() as name:
                torch.multiprocessing.spawn(measure, (ranks, shape, Path(name)), nprocs=ranks)
                found = [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(ranks)]
            told = f"CP{ranks}, {shape[0]} heads of {shape[2]}, {shape[1]} of keys"
            seconds = max(one["seconds"] for one in found)
            print(f"{told:32}{max(one['beyond_mib'] for one in found):7.1f} MiB{seconds:8.1f} s of CPU", flush=True)


def measure(rank: int, ranks: int, shape: tuple[int, int, int], folder: Path) -> None:
    """Measures one rank; the first pass, over short answers, loads what a first pass loads."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    group = dist.group.WORLD if ranks > 1 else None
    sharding = RowSharding(multiple=2 * ranks if group else 1, ranks=ranks, rank=rank, group=group)
    one_pass(64, shape, sharding)
    dist.barrier()
    time.sleep(1.0)  # Another rank's last exchange ends.
    (folder / f"{rank}.json").write_text(json.dumps(one_pass(ANSWER, shape, sharding)))


def one_pass(answer: int, shape: tuple[int, int, int], sharding: RowSharding) -> dict[str, float]:
    """Runs attention forward and backward; the keys are those of the rank, which the plan gathers."""
    heads, key_heads, dim = shape
    lengths = [answer] * ANSWERS
    prompt, tokens = (np.zeros(count, dtype=np.int32) for count in (TRUNK, sum(lengths)))
    end = answers_tree("g0", prompt, lengths, tokens).end.astype(np.int64)
    padded = sharding.padded(len(end))
    attention = attention_over(end, sharding, padded=padded, device=torch.device("cpu"), dtype=torch.float32)
    rows = padded // sharding.ranks
    inputs: list[Any] = [torch.randn(rows, count, dim).requires_grad_() for count in (heads, key_heads, key_heads)]
    incoming = torch.randn(rows, heads * dim)
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
    base, start_s = memory_mb("VmRSS"), time.process_time()
    output = attention.attend(*inputs, scale=None)
    output.backward(incoming)
    seconds = time.process_time() - start_s
    results = output.nbytes + sum(one.grad.nbytes for one in inputs)
    return {"beyond_mib": memory_mb("VmHWM") - base - results / 2**20, "seconds": seconds}


if __name__ == "__main__":
    main()
