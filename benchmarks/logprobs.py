"""Measures time and memory of three ways to compute per-token log-probs over a large vocabulary, with gradients.

    python -m benchmarks.logprobs [--rows 4096 --vocab 151936 --hidden 256 --chunk 128 --repeats 1]
    python -m benchmarks.logprobs --way kept --kept 20 # one way: kept sets of 20 tokens; see `ours`

Each way runs in a separate process. Peak: the process's high-water mark (VmHWM) minus its resident memory before the
passes, when inputs and their gradients are allocated already. The peak includes the weight gradient that autograd
returns before accumulation. Time: CPU seconds of one thread, the minimum of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from relax_core.contracts.kept_tokens import KeptTokens

if TYPE_CHECKING:
    from torch import Tensor

WAYS = ("naive", "checkpointed", "ours")
MORE_OUTPUTS = ("entropy", "top_8", "kept")  # of `head_outputs`; not in the table: the loss differs
DEADLINE_S = 1800


def main() -> None:
    arguments = _parse()
    if arguments.way is not None:
        print(json.dumps(_measure(arguments)))
        return
    flags = {name: value for name, value in vars(arguments).items() if name not in ("way", "kept")}
    figures = {way: in_own_process(way, flags) for way in WAYS}
    naive = figures["naive"]
    print(
        f"{arguments.rows:,} rows × {arguments.vocab:,} tokens, hidden {arguments.hidden}, {arguments.dtype}, "
        f"chunk {arguments.chunk}; forward + backward, one thread"
    )
    print(f"{'':14}{'CPU s':>9}{'of naive':>10}{'peak MB':>9}{'of naive':>10}{'gradient norm off':>19}")
    for way, found in figures.items():
        print(
            f"{way:14}{found['seconds']:9.4g}{found['seconds'] / naive['seconds']:9.2f}×{found['peak_mb']:9.0f}"
            f"{found['peak_mb'] / naive['peak_mb']:9.3f}×{abs(found['checksum'] / naive['checksum'] - 1):19.1e}"
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kept", type=int, default=20, help="tokens of each kept set of --way kept")
    parser.add_argument("--way", choices=WAYS + MORE_OUTPUTS, help="measure one way in this process and print JSON")
    return parser.parse_args()


def in_own_process(way: str, flags: Mapping[str, object] | None = None) -> dict[str, float]:
    """Returns ``seconds``, ``peak_mb`` and ``checksum`` of one way. ``flags`` are options of this command."""
    given = [f"--{name}={value}" for name, value in (flags or {}).items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.logprobs", f"--way={way}", *given],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"{way} ended with {ended.returncode} (-9: out of memory?)")
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def _measure(arguments: argparse.Namespace) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    hidden = (torch.randn(arguments.rows, arguments.hidden, generator=generator) * 0.5).to(dtype).requires_grad_()
    weight = (torch.randn(arguments.vocab, arguments.hidden, generator=generator) * 0.05).to(dtype).requires_grad_()
    targets = torch.randint(0, arguments.vocab, (arguments.rows,), generator=generator)
    incoming = torch.randn(arguments.rows, generator=generator)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    kept = _kept_sets(arguments, targets) if arguments.way == "kept" else None
    few = KeptTokens.of_lists([[0], list(range(1, 8))], vocab_size=8)  # a set of ids, and a bitmask
    warm_up, run = (_ways(arguments.chunk, sets)[arguments.way] for sets in (few, kept))
    warm_up(hidden[:2], weight[:8], targets[:2] % 8)  # loads lazily loaded code
    base = memory_mb("VmRSS")
    seconds = []
    for _ in range(arguments.repeats):
        start = time.process_time()
        (run(hidden, weight, targets) * incoming).sum().backward()
        seconds.append(time.process_time() - start)
    peak = memory_mb("VmHWM") - base
    checksum = hidden.grad.double().norm() + weight.grad.double().norm()
    return {"seconds": min(seconds), "peak_mb": peak, "checksum": float(checksum)}


def _kept_sets(arguments: argparse.Namespace, targets: Tensor) -> KeptTokens:
    """Returns for each row a set of ``--kept`` consecutive token ids that contains the row's target."""
    first = targets.numpy() % arguments.vocab
    if arguments.kept <= -(-arguments.vocab // 32):
        ids = (first[:, None] + np.arange(arguments.kept)) % arguments.vocab
        counts = np.full(len(first), arguments.kept, dtype="<i4")
        return KeptTokens(arguments.vocab, counts.tobytes(), ids.astype("<u4").tobytes())
    parts = []
    for start in first.tolist():
        mask = np.zeros((1, arguments.vocab), dtype=bool)
        mask[0, (start + np.arange(arguments.kept)) % arguments.vocab] = True
        parts.append(KeptTokens.of_mask(mask))
    return KeptTokens.joined(parts)


def _ways(chunk_rows: int, sets: KeptTokens | None) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    import torch
    from torch.utils.checkpoint import checkpoint

    from relax_core.train.model.logprobs import Truncation, head_outputs

    def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = (hidden @ weight.t()).float()
        return torch.log_softmax(logits, dim=1).gather(1, targets[:, None])[:, 0]

    def checkpointed(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        chunks = zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True)
        return torch.cat([checkpoint(naive, part, weight, chosen, use_reentrant=False) for part, chosen in chunks])

    def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return head_outputs(hidden, weight, targets, inverse_temperature=1.0, chunk_rows=chunk_rows).logprobs

    def kept(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        left = Truncation.of(sets, [], hidden.device)
        return head_outputs(
            hidden, weight, targets, inverse_temperature=1.0, chunk_rows=chunk_rows, truncation=left
        ).logprobs

    def entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        outputs = head_outputs(hidden, weight, targets, inverse_temperature=1.0, chunk_rows=chunk_rows, entropy=True)
        assert outputs.entropy is not None
        return outputs.logprobs + outputs.entropy

    def top_8(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        chosen = (targets[:, None] + torch.arange(8)) % weight.shape[0]
        outputs = head_outputs(hidden, weight, targets, inverse_temperature=1.0, chunk_rows=chunk_rows, gather=chosen)
        assert outputs.gathered is not None
        return outputs.logprobs + outputs.gathered.sum(dim=1)

    return {
        "naive": naive,
        "checkpointed": checkpointed,
        "ours": ours,
        "entropy": entropy,
        "top_8": top_8,
        "kept": kept,
    }


def memory_mb(field: str) -> float:
    """Returns a field of /proc/self/status in MiB."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
