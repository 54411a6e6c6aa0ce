"""Computes a tree's attention on one of two context-parallel ranks that exchange the keys of one head at a time.

python gathered_keys_rank.py <rank> <2> <port> <folder>: writes the rank's rows, its output and its gradients.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from forests import random_rows, two_level

from relax_core.train.context_parallel import RowSharding
from relax_core.train.model import branch_attention
from relax_core.train.model.branch_attention import BranchPlan

FOREST = two_level([[60, 7], [50, 3]], [30, 20])


def main() -> None:
    rank, ranks, port, folder = (*map(int, sys.argv[1:4]), Path(sys.argv[4]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    branch_attention._CALL_BYTES = 1
    branch_attention.MASKLESS_SAVES_PAIRS = -(10**12)
    sharding = RowSharding(multiple=4, ranks=ranks, rank=rank, group=dist.group.WORLD)
    padded = sharding.padded(len(FOREST.parents))
    plan = BranchPlan.of(FOREST.end, dtype=torch.float64, sharding=sharding, padded=padded)
    assert plan is not None
    mine = torch.from_numpy(sharding.rows_of_rank(padded))
    *inputs, incoming = (rows.detach()[mine] for rows in random_rows(padded, dtype=torch.float64, seed=3))
    inputs = [tensor.requires_grad_() for tensor in inputs]
    incoming[mine >= len(FOREST.parents)] = 0
    output = plan.attend(*inputs, scale=None)
    torch.save((mine, [output.detach(), *torch.autograd.grad(output, inputs, incoming)]), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
