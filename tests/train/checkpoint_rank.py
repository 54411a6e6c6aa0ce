"""Runs one data-parallel rank as a process that trains, saves or loads, and trains on; rank 0 writes the weights.

python checkpoint_rank.py <rank> <world size> <port> <model folder> <output> <distributed optimizer: 0|1>
                          <checkpoint folder or -> <load|save|absent|slow>

``save`` makes 2 steps, saves and makes 2 more. ``load`` loads and makes the 2 more. ``absent`` makes 2 steps and exits
without saving. ``slow`` is ``save`` with a disk of rank 1 that takes longer than other waits for ranks may take.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from tiny_trainer import dp_groups, make_backend, train_step

from relax_core.train import process_group
from relax_core.train.checkpoints.checkpoint_shards import SyncedFiles
from relax_core.train.micro_batches import split_over_ranks

SHORT_S = 4.0


def slow_down(create_stream: Any) -> Any:
    def create_late(*arguments: Any) -> Any:
        time.sleep(1.5 * SHORT_S)
        return create_stream(*arguments)

    return create_late


def main() -> None:
    rank, world_size, port, folder, output, sharded, checkpoint, what = sys.argv[1:]

    def build(timeout_s: float) -> Any:
        return make_backend(
            Path(folder),
            rank=int(rank),
            world_size=int(world_size),
            store_address=f"127.0.0.1:{port}",
            distributed_optimizer=sharded == "1",
            timeout_s=timeout_s,
            optimizer={"eps": 1e-4},
        )

    backend = build(300.0)
    if what == "slow":  # Both processes are running now.
        process_group.leave()
        backend = build(SHORT_S)
        if rank == "1":
            SyncedFiles.create_stream = slow_down(SyncedFiles.create_stream)

    def train(step: int) -> None:
        train_step(backend, [split_over_ranks(groups, int(world_size))[int(rank)] for groups in dp_groups()], step=step)

    if what == "load":
        backend.load(Path(checkpoint))
    else:
        train(0)
        train(1)
        if what == "absent" and rank != "0":
            os._exit(0)  # During an orderly exit the threads of gloo may abort the process.
        backend.save(Path(checkpoint))
    train(2)
    train(3)
    if rank == "0":
        save_file({name: tensor.contiguous() for name, tensor in backend.export()}, output)
    dist.barrier()
    os._exit(0)  # Threads of gloo may abort a process during its interpreter's shutdown.


if __name__ == "__main__":
    main()
