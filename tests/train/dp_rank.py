"""Runs one data-parallel rank as a process that trains some steps; rank 0 writes weights and metrics.

python dp_rank.py <rank> <world size> <port> <model folder> <output> <distributed optimizer: 0|1> <steps> <timeout s>
                  <policy|critic> <most steps of all ranks>
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from tiny_trainer import dp_groups, make_backend, make_critic, train_step

from relax_core.train.micro_batches import split_over_ranks


def main() -> None:
    rank, world_size, port, folder, output, sharded, steps, timeout_s, what, most = sys.argv[1:]
    backend = {"policy": make_backend, "critic": make_critic}[what](
        Path(folder),
        rank=int(rank),
        world_size=int(world_size),
        store_address=f"127.0.0.1:{port}",
        distributed_optimizer=sharded == "1",
        timeout_s=float(timeout_s),
        optimizer={"eps": 1e-4},
    )
    begun = Path(f"{output}.begun")
    for step in range(int(steps)):
        if rank == "0":
            begun.write_text(str(step))
        micro_batches = [split_over_ranks(groups, int(world_size))[int(rank)] for groups in dp_groups()]
        metrics = train_step(backend, micro_batches, step=step)
    if rank == "0":
        tensors = backend.export() if what == "policy" else backend.model.named_parameters()
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors}, f"{output}.safetensors")
        Path(f"{output}.json").write_text(json.dumps(asdict(metrics)))
    if steps == most:
        dist.barrier()  # A rank that exits breaks the connections of ranks that are still computing.
    else:
        while begun.read_text() != steps:  # Rank 0 has not begun the step that this rank does not train.
            time.sleep(0.05)
        time.sleep(1.0)  # Rank 0 is waiting for the ranks now; gloo names missing ranks only in that state.
    os._exit(0)  # Threads of gloo may abort a process during its interpreter's shutdown.


if __name__ == "__main__":
    main()
