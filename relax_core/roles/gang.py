"""The actor's ranks as one: the lead rank's own back end and its peers' in other processes, called in step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from relax_core.contracts.train import StepMetrics, TrainGroup
from relax_core.roles.backend import build_backend
from relax_core.roles.context import RunContext
from relax_core.train.micro_batches import split_over_ranks

if TYPE_CHECKING:
    from relax_core.train.backend import MegatronBackend


class RankLost(RuntimeError):
    """A rank of the trainer died or did not answer before its deadline; the text names it."""


class ActorPeer:
    """One rank > 0 of the trainer, in its own process. Its methods run one after the other, in the lead's order."""

    def __init__(self, context: RunContext, rank: int, store_address: str) -> None:
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


class Gang:
    """All data-parallel ranks. Every call goes to the peers first, so that collectives find everyone there."""

    def __init__(self, lead: MegatronBackend, peers: Sequence[Any], *, timeout_s: float) -> None:
        self.lead = lead
        self._peers = list(peers)
        self._timeout_s = timeout_s

    def begin_step(self, step: int) -> None:
        refs = self._send("begin_step", step)
        self.lead.begin_step(step)
        self._wait("begin_step", refs)

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        shares = split_over_ranks(groups, 1 + len(self._peers))
        refs = [peer.accumulate.remote(share) for peer, share in zip(self._peers, shares[1:], strict=True)]
        self.lead.accumulate(shares[0])
        self._wait("accumulate", refs)

    def finish_step(self) -> StepMetrics:
        refs = self._send("finish_step")
        metrics = self.lead.finish_step()
        self._wait("finish_step", refs)
        return metrics

    def save(self, folder: Path) -> None:
        refs = self._send("save", folder)
        self.lead.save(folder)
        self._wait("save", refs)

    def load(self, folder: Path) -> None:
        refs = self._send("load", folder)
        self.lead.load(folder)
        self._wait("load", refs)

    def _send(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(peer, method).remote(*arguments) for peer in self._peers]

    def _wait(self, method: str, refs: Sequence[Any]) -> None:
        for rank, ref in enumerate(refs, start=1):
            try:
                ray.get(ref, timeout=self._timeout_s)
            except (RayActorError, GetTimeoutError) as error:
                raise RankLost(f"trainer rank {rank} was lost in {method}: {error}") from error
