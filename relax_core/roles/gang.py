"""The trainer as one: the lead rank's own back end, its peers' and the critic in other processes, called in step."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from relax_core.contracts.train import StepMetrics, TrainGroup
from relax_core.roles.backend import build_backend
from relax_core.roles.context import RunContext, worker_name
from relax_core.roles.worker import WorkerStatus, process_host, python_stacks
from relax_core.train.micro_batches import split_over_ranks
from relax_core.train.updates import UpdateMetrics

if TYPE_CHECKING:
    from relax_core.train.backend import MegatronBackend


POLICY, CRITIC = "train", "critic"  # their folders in a checkpoint


class RankLost(RuntimeError):
    """A rank of the trainer or its critic died or did not answer before its deadline; the text names it."""


STATUS_GROUPS = {"status": 1}  # a thread of its own answers how the rank is, whatever it computes


class ActorPeer:
    """One rank > 0 of the trainer, in its own process. Its methods run one after the other, in the lead's order; only
    what it tells of itself comes at once. Start it with `STATUS_GROUPS`."""

    def __init__(self, context: RunContext, rank: int, store_address: str) -> None:
        self._name = worker_name("actor", rank)
        self._since = time.time()
        self._backend = build_backend(
            context,
            rank=rank,
            world_size=context.config.parallel.dp,
            store_address=store_address,
            trainable=True,
        )

    def begin_step(self, step: int) -> None:
        self._backend.begin_step(step)

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        self._backend.accumulate(groups)

    def finish_step(self) -> StepMetrics:
        return self._backend.finish_step()

    def save(self, folder: Path) -> None:
        self._backend.save(folder)

    def load(self, folder: Path) -> None:
        self._backend.load(folder)

    @ray.method(concurrency_group="status")
    def status(self) -> WorkerStatus:
        return WorkerStatus(
            name=self._name,
            state="running",
            since=self._since,
            pid=os.getpid(),
            detail="follows actor-0",
            error=None,
            host=process_host(),
        )

    @ray.method(concurrency_group="status")
    def stacks(self) -> dict[str, str]:
        return python_stacks()


class Gang:
    """All data-parallel ranks of the policy, and the critic where there is one. Every call goes to the others first: so
    collectives find everyone there, and the critic works beside the lead. ``peers``, ``critic``: Ray handles."""

    def __init__(
        self, lead: MegatronBackend, peers: Sequence[Any], *, timeout_s: float, critic: Any | None = None
    ) -> None:
        self.lead = lead
        self._peers = [(f"trainer rank {rank}", peer) for rank, peer in enumerate(peers, start=1)]
        self._critic = [] if critic is None else [("the critic", critic)]
        self._timeout_s = timeout_s

    def begin_step(self, step: int) -> None:
        sent = self._send([*self._peers, *self._critic], "begin_step", step)
        self.lead.begin_step(step)
        self._wait("begin_step", sent)

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        if not groups:
            return
        shares = split_over_ranks(groups, 1 + len(self._peers))
        sent = [
            (who, peer.accumulate.remote(share)) for (who, peer), share in zip(self._peers, shares[1:], strict=True)
        ]
        sent += self._send(self._critic, "accumulate", groups)
        self.lead.accumulate(shares[0])
        self._wait("accumulate", sent)

    def finish_step(self) -> UpdateMetrics:
        sent = self._send([*self._peers, *self._critic], "finish_step")
        policy = self.lead.finish_step()
        answers = self._wait("finish_step", sent)
        return UpdateMetrics(policy=policy, critic=answers[-1] if self._critic else None)

    def save(self, folder: Path) -> None:
        """Writes ``folder``/train and, with a critic, ``folder``/critic."""
        sent = self._send(self._peers, "save", folder / POLICY) + self._send(self._critic, "save", folder / CRITIC)
        self.lead.save(folder / POLICY)
        self._wait("save", sent)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote."""
        sent = self._send(self._peers, "load", folder / POLICY) + self._send(self._critic, "load", folder / CRITIC)
        self.lead.load(folder / POLICY)
        self._wait("load", sent)

    @staticmethod
    def _send(to: Sequence[tuple[str, Any]], method: str, *arguments: Any) -> list[tuple[str, Any]]:
        return [(who, getattr(handle, method).remote(*arguments)) for who, handle in to]

    def _wait(self, method: str, sent: Sequence[tuple[str, Any]]) -> list[Any]:
        answers = []
        for who, reference in sent:
            try:
                answers.append(ray.get(reference, timeout=self._timeout_s))
            except (RayActorError, GetTimeoutError) as error:
                raise RankLost(f"{who} was lost in {method}: {error}") from error
        return answers
