"""Runs one of two tensor-parallel ranks. Rank 0 writes the results of every role from the output layer.

python truncated_ranks.py <rank> <2> <port> <model folder> <rows, as MessagePack> <folder of the output>
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch.distributed as dist

from relax_core.contracts.bus import Group
from tests.roles.trainer.truncated_rows import BANNED, TEMPERATURE, head_outputs_of
from tests.train.tiny_trainer import make_backend, parallel_config


def main() -> None:
    rank, size, port, folder, rows_file, output = sys.argv[1:]
    rows = msgspec.msgpack.decode(Path(rows_file).read_bytes(), type=dict[str, list[Group]])

    def backend(**settings: object) -> object:
        return make_backend(
            Path(folder),
            rank=int(rank),
            world_size=int(size),
            store_address=f"127.0.0.1:{port}",
            parallel=parallel_config(tp=2),
            temperature=TEMPERATURE,
            banned_token_ids=[BANNED],
            **settings,
        )

    for name, found in head_outputs_of(rows, backend).items():
        np.savez(Path(output) / f"rank{rank}-{name}.npz", **found)
    dist.barrier()
    os._exit(0)  # Gloo's threads may abort a process while its interpreter shuts down.


if __name__ == "__main__":
    main()
