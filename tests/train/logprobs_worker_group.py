"""Runs two tensor-parallel ranks of the output layer as processes. They solve a sequence of problems."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from relax_core.contracts.kept_tokens import KeptTokens

RANKS = 2
DEADLINE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Defines a problem with the complete ``weight``. Each rank uses its shard.

    ``incoming`` are the gradients of log-probs ``[rows]``, entropy ``[rows]`` and gathered ``[rows, k]``. None means
    that the problem does not request this output. ``kept`` and ``banned`` define the truncation.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    incoming: tuple[Tensor | None, ...]
    gather: Tensor | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    top_k: int = 1
    kept: KeptTokens | None = None
    banned: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Holds the functions' outputs. ``weight_gradient`` covers the rank's shard, or with one rank the whole weight."""

    outputs: list[Tensor]
    hidden_gradient: Tensor
    weight_gradient: Tensor
    top_k: list[Tensor]


def solve(problem: Problem, *, rank: int = 0, group: dist.ProcessGroup | None = None) -> Answer:
    """Solves a problem as a rank of ``group``, or as a single process."""
    from relax_core.train.model.logprobs import Truncation, head_outputs, top_k_tokens

    own = problem.settings | {"truncation": Truncation.of(problem.kept, problem.banned, problem.hidden.device)}
    shard = problem.weight if group is None else problem.weight.chunk(RANKS)[rank]
    hidden, weight = problem.hidden.clone().requires_grad_(), shard.clone().requires_grad_()
    outputs = head_outputs(
        hidden,
        weight,
        problem.targets,
        gather=problem.gather,
        entropy=problem.incoming[1] is not None,
        group=group,
        **own,
    )
    pairs = [
        (out, flow) for out, flow in zip(outputs, problem.incoming, strict=True) if out is not None and flow is not None
    ]
    values, flows = ([pair[side] for pair in pairs] for side in (0, 1))
    of_hidden, of_weight = torch.autograd.grad(values, [hidden, weight], [flow.to(values[0].dtype) for flow in flows])
    top = top_k_tokens(hidden, weight, problem.targets, top_k=problem.top_k, group=group, **own)
    return Answer(
        outputs=[out.detach() for out, _ in pairs],
        hidden_gradient=of_hidden,
        weight_gradient=of_weight,
        top_k=list(top),
    )


class WorkerGroup:
    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def solve(self, problem: Problem) -> list[Answer]:
        """Returns each rank's answer."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(problem))  # pipe.send would send the tensors as file handles
        for pipe in self._pipes:
            assert pipe.poll(DEADLINE_S), "a rank gave no answer"
        return [pickle.loads(pipe.recv_bytes()) for pipe in self._pipes]


@contextmanager
def worker_group(folder: Path) -> Iterator[WorkerGroup]:
    """Starts the ranks. They connect through the empty ``folder``."""
    context = multiprocessing.get_context("spawn")
    pipes, ranks = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, theirs, str(folder / "store")), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        ranks.append(process)
    try:
        yield WorkerGroup(pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in ranks:
            process.join(DEADLINE_S)
            process.kill()


def _rank(rank: int, pipe: Connection, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=DEADLINE_S)
    )
    while True:
        try:
            problem = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        pipe.send_bytes(pickle.dumps(solve(problem, rank=rank, group=dist.group.WORLD)))
    dist.destroy_process_group()
