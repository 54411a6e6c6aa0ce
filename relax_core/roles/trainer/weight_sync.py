"""The trainer's calls to its engines: new weights, and in time sharing the memory. No engine holds a step for long."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from relax_core.contracts.engine import EngineError, EngineUnreachable
from relax_core.engines.pool.fan_out import FanOut
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.roles.process.role_context import RunContext
from relax_core.weights.call_queues import CallQueues
from relax_core.weights.publisher import Push, SyncReport, WeightPublisher
from relax_core.weights.transports.base import WeightTransport

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class WaitingOn(Protocol):
    """`Worker.waiting`."""

    def __call__(self, what: str, *, on: str) -> AbstractContextManager[None]: ...


class Engines(Protocol):
    """`EngineDirectory`, as it is used here."""

    def reachable(self) -> list[EngineClient]: ...

    def forget(self, url: str) -> None: ...


class EngineSync:
    """Publishes weight versions and hands memory over. All calls to one engine are made in order, in a thread of its
    own.

    A step waits for an engine's push, and for its taking back of memory, ``engine.silent_s`` seconds at most. The
    giving up of memory is waited for until the engine has answered or is gone: training in memory that an engine still
    holds would end the trainer, and in time sharing the next step needs that engine's samples anyway. The engine's
    owner ends an engine that is silent for ``run.heartbeat_timeout_s``, and each call has ``engine.sync_timeout_s``.
    """

    def __init__(
        self, context: RunContext, engines: Engines, transport: WeightTransport, *, waiting: WaitingOn
    ) -> None:
        engine = context.config.engine
        self._silent_s = engine.silent_s
        self._stall_s = context.config.run.stall_timeout_s
        self._waiting = waiting
        self._engines = engines
        self._calls = CallQueues()
        self._publisher = WeightPublisher(
            context.weights_folder,
            self._engines.reachable,
            transport=transport,
            model_folder=context.model_folder,
            calls=self._calls,
        )
        self._push: Push | None = None
        self._behind: frozenset[str] = frozenset()
        self._told: set[str] = set()  # engines that were named as such
        self._resumes: dict[str, Future[dict[str, Any]]] = {}  # engine url → its newest `resume_memory`

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the weights. Their push goes on beside the trainer; take its end before the next version."""
        self._push = self._publisher.publish(version, tensors)

    def end_push(self) -> SyncReport | None:
        """Waits for the end of the newest version's push; None where it was waited for before."""
        if self._push is None:
            return None
        with self._waiting("the end of the newest weights' push", on="engine"):
            report, self._push = self._push.result(timeout=self._silent_s), None
        for url, why in report.refused.items():
            log.warning("weights %d: %s does not serve them: %s", report.version, url, why)
            self._engines.forget(url)
        for url in report.behind - self._told:
            log.warning(
                "weights %d: %s has not answered within engine.silent_s=%g; its owner brings it to the newest ones "
                "when it answers",
                report.version,
                url,
                self._silent_s,
            )
        self._told |= report.behind
        self._behind = report.behind
        return report

    def release_memory(self) -> None:
        """Time sharing: returns once every engine has given up its memory, or is gone."""
        calls = {client.url: self._calls.put(client.url, client.release_memory) for client in self._engines.reachable()}
        with self._waiting("the engines to give up their memory", on="engine"):
            _, late = wait(calls.values(), timeout=self._stall_s)
        if late:
            urls = ", ".join(url for url, call in calls.items() if call in late)
            raise EngineUnreachable(f"{urls}: memory not given up within run.stall_timeout_s={self._stall_s:g}")
        resumes, self._resumes = self._resumes, {}  # each was made before the same engine's release
        _check(resumes)
        _check(calls)

    def resume_memory(self) -> None:
        """Time sharing: tells every engine that the memory is its own again."""
        self._resumes = {
            client.url: self._calls.put(client.url, client.resume_memory) for client in self._engines.reachable()
        }
        awaited = [call for url, call in self._resumes.items() if url not in self._behind]
        with self._waiting("the engines to take their memory back", on="engine"):
            wait(awaited, timeout=self._silent_s)
        _check({url: call for url, call in self._resumes.items() if call.done()})

    def close(self) -> None:
        self._publisher.close()


def _check(calls: Mapping[str, Future[dict[str, Any]]]) -> None:
    """Of calls that have ended. An engine that is gone has no memory, and its owner restarts it; one that refuses is
    there and keeps its memory, which is raised."""
    failed: dict[str, EngineError] = {}
    for url, call in calls.items():
        try:
            call.result()
        except EngineError as error:
            failed[url] = error
    if failed:
        log.warning("%s", FanOut(answers=dict.fromkeys(calls.keys() - failed.keys()), failures=failed).words())
    for why in failed.values():
        if not isinstance(why, EngineUnreachable):
            raise why
