"""Runs one data-parallel rank that trains, and may save or load a checkpoint. Rank 0 writes weights and metrics.

python dp_rank.py <rank> <world size> <port> <model folder> <output> <settings as JSON>

The settings are ``sharded``, ``timeout_s``, ``head``, the number of ``steps``, and ``most``, the largest number of
steps of any rank. With ``what`` the rank trains 4 steps and uses a ``checkpoint`` after the second step: ``save`` saves
the checkpoint and continues. ``load`` loads the checkpoint in place of the first 2 steps. With ``absent`` only rank 0
saves; the other ranks exit. ``slow`` is ``save``, but the disk of rank 1 takes longer than the timeout of other waits
for ranks.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from tiny_trainer import dp_groups, make_backend, make_critic, train_step

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
    rank, world_size, port = map(int, sys.argv[1:4])
    folder, output, settings = Path(sys.argv[4]), sys.argv[5], json.loads(sys.argv[6])
    make = {"policy": make_backend, "critic": make_critic}[settings.get("head", "policy")]
    what = settings.get("what", "")

    def build(timeout_s: float) -> Any:
        return make(
            folder,
            rank=rank,
            world_size=world_size,
            store_address=f"127.0.0.1:{port}",
            distributed_optimizer=settings["sharded"],
            timeout_s=timeout_s,
            optimizer={"eps": 1e-4},
        )

    backend = build(settings.get("timeout_s", 300.0))
    if what == "slow":  # both processes are running now
        process_group.leave()
        backend = build(SHORT_S)
        if rank == 1:
            SyncedFiles.create_stream = slow_down(SyncedFiles.create_stream)
    begun = Path(f"{output}.begun")

    def train(steps: Iterable[int]) -> Any:
        for step in steps:
            if rank == 0:
                begun.write_text(str(step))
            mine = [split_over_ranks(groups, world_size)[rank] for groups in dp_groups()]
            metrics = train_step(backend, mine, step=step)
        return metrics

    steps, most = settings.get("steps", 4), settings.get("most", 4)
    if what == "load":
        backend.load(Path(settings["checkpoint"]))
    elif what:
        train(range(2))
        if what == "absent" and rank != 0:
            os._exit(0)  # During a normal exit gloo's threads may abort the process.
        backend.save(Path(settings["checkpoint"]))
    metrics = train(range(2 if what else 0, steps))
    if rank == 0:
        tensors = backend.export() if make is make_backend else backend.model.named_parameters()
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors}, f"{output}.safetensors")
        Path(f"{output}.json").write_text(json.dumps(asdict(metrics)))
    if steps == most:
        dist.barrier()  # the exit of a rank breaks the connections of ranks that still compute
    else:
        while begun.read_text() != str(steps):  # wait until rank 0 begins the step that this rank omits
            time.sleep(0.05)
        time.sleep(1.0)  # let rank 0 wait for the ranks, because only then gloo names missing ranks
    os._exit(0)  # Threads of gloo may abort a process during its interpreter's shutdown.


if __name__ == "__main__":
    main()
