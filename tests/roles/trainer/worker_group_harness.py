"""Ranks with fake backends, for the tests of the worker group."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from relax_core.contracts.bus import Lease
from relax_core.contracts.train import RankTimes
from relax_core.contracts.tree import TokenTree
from relax_core.roles.discovery import discover_bus
from relax_core.roles.role_context import RunContext
from relax_core.roles.trainer.rank_worker import STATUS_GROUPS, ActorRank, policy_groups
from relax_core.roles.trainer.worker_group import Ranks, TrainerWorkerGroup
from relax_core.roles.worker import WorkerStatus
from relax_core.train.micro_batches import NO_TOWER

Seen = tuple[list[str], list[int], list[float]]  # episodes, tokens and advantages of a trained tree
STEP = 0
OVERRIDES = ("parallel.dp=2", "parallel.tp=2")
BROKE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by other rank"


class Backend:
    """A fake rank that can fail on request. A row's log-prob is the token plus 1,000 times the rank's number."""

    tower_work = NO_TOWER

    def __init__(self, rank: int, *, fails: str = "") -> None:
        self.rank, self.fails = rank, fails
        self.seen: list[Seen] = []
        self.counted: list[str] = []

    def begin_step(self, step: int) -> None:
        self.step = step

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        self.seen += [seen(group) for group in groups]
        if self.fails == "dies":
            os._exit(1)
        if self.fails == "a bad loss":
            raise ValueError(self.fails)
        if self.fails == "hangs":
            threading.Event().wait()
        if self.fails:
            raise RuntimeError(self.fails)

    def count(self, groups: Sequence[TokenTree]) -> None:
        self.counted += [group.group_uid for group in groups]

    def finish_step(self) -> None:
        self.times = RankTimes(began_s=1.0, ended_s=2.0, wall_ms={"forward": 10.0 * self.rank}, cpu_ms={}, rows=7)

    def write_copy(self, folder: Path) -> None:
        (folder / f"rank-{self.rank}").write_text("a copy")

    def logprobs(self, groups: Sequence[TokenTree]) -> list[np.ndarray]:
        return [1000.0 * self.rank + group.token_ids for group in groups]


class Patient(Backend):
    """A lead rank. Its part lasts until another rank has finished its part."""

    def __init__(self, other_rank: Any) -> None:
        super().__init__(0)
        self._other_rank = other_rank

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        import ray

        super().accumulate(groups)
        ray.get(self._other_rank.seen.remote(), timeout=120)  # calls of a rank run sequentially


class OtherRank(ActorRank):
    """A rank with a backend that needs no other ranks."""

    role = "reference"  # a role without plug-ins in its process, so its output needs no log

    def warm_up(self) -> None:
        """Does nothing, because the test needs no Megatron."""

    def build(self, fails: str) -> None:
        with self._busy("build"):
            if fails == "no file":
                raise FileNotFoundError(fails)
            if fails == "hangs in build":
                threading.Event().wait()
            self._built = Backend(self._rank, fails=fails)  # type: ignore[assignment]
            self._rank_groups = policy_groups(self._context, discover_bus(self._context, self.waiting))

    def seen(self) -> list[Seen]:
        return self._backend.seen  # type: ignore[attr-defined]


class RestartedRank(OtherRank):
    """A rank of a role that Ray restarts."""

    ends_with_others = True


def seen(tree: TokenTree) -> Seen:
    return [episode.uid for episode in tree.episodes], tree.token_ids.tolist(), tree.extras["advantages"].tolist()


def start(
    other_ranks: list[Any], count: int, context: RunContext, *, of: type[ActorRank] = OtherRank, **fails: str
) -> list[tuple[str, Any]]:
    """Starts the other ranks and builds their backends."""
    import ray

    members = begin(other_ranks, count, context, of=of)
    ray.get(
        [
            other_rank.build.remote(fails.get(f"rank_{rank}", ""))
            for rank, (_, other_rank) in enumerate(members, start=1)
        ]
    )
    return members


def begin(
    other_ranks: list[Any], count: int, context: RunContext, *, of: type[ActorRank] = OtherRank
) -> list[tuple[str, Any]]:
    import ray

    options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": STATUS_GROUPS, "max_restarts": 1}
    remote: Any = ray.remote(**options)(of)
    other_ranks += [remote.remote(f"actor-{rank}", context, rank) for rank in range(1, count + 1)]
    return [(f"actor-{rank}", other_rank) for rank, other_rank in enumerate(other_ranks, start=1)]


def pid_of(other_rank: Any) -> int | None:
    """Returns the rank's pid, or None while Ray starts another process."""
    import ray
    from ray.exceptions import ActorUnavailableError

    try:
        return int(ray.get(other_rank.status.remote()).pid)
    except ActorUnavailableError:
        return None


def one_replica(lead: Backend, members: list[tuple[str, Any]], lease: Lease, **options: Any) -> TrainerWorkerGroup:
    """Returns a worker group with one replica, in the step of the lease. ``options`` configure the worker group."""
    ranks = Ranks(
        name="actor-0",
        lead=lead,  # type: ignore[arg-type]
        other_ranks=members,
        replicas=[list(range(len(members) + 1))],
    )
    worker_group = TrainerWorkerGroup(ranks, **{"timeout_s": 120.0, "waiting": waiting, **options})
    worker_group.begin_step(STEP)
    worker_group.add_lease(lease)
    return worker_group


def waiting(what: str, *, on: str) -> Any:
    return nullcontext()


def status_of(other_rank: Any) -> WorkerStatus:
    import ray

    status: WorkerStatus = ray.get(other_rank.status.remote())
    return status
