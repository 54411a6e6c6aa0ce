"""Pushes weights from the trainer to its engines.

With time sharing, trainer and engines alternate in the GPU memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from relax_core.contracts.engine import SILENT_S, EngineError, EngineUnreachable
from relax_core.contracts.outage import OUTAGE_SHARE
from relax_core.engines.engine_states import FanOut
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.roles.role_context import RunContext
from relax_core.roles.trainer.worker_group import WaitingOn
from relax_core.weights.call_queues import CallQueues
from relax_core.weights.publisher import Push, SyncReport, WeightPublisher
from relax_core.weights.transports import WeightTransport

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.roles.engine_directory import EngineDirectory
    from relax_core.weights.lora_merge import LoraFactors

log = logging.getLogger(__name__)


class WeightSync:
    """Publishes weight versions and hands memory over. For each engine, a thread makes all calls to it, in order.

    A step waits at most `SILENT_S` seconds for the push to an engine, and the same time until the engine uses its
    memory again. Before it uses the memory, the trainer waits until each engine has released it or has died, because
    memory that an engine still uses would make the trainer crash. With time sharing, the next step needs the samples of
    this engine anyway. The owner kills an engine that does not answer for ``run.heartbeat_timeout_s``, and each call
    has the time limit `SYNC_TIMEOUT_S`. ``frozen`` names the weights that are not trained. With LoRA these are the
    weights of the base model.
    """

    def __init__(
        self,
        context: RunContext,
        engines: EngineDirectory,
        transport: WeightTransport,
        *,
        waiting: WaitingOn,
        frozen: Collection[str] = (),
    ) -> None:
        self._stall_s = context.config.run.stall_timeout_s
        self._waiting = waiting
        self._engines = engines
        self._calls = CallQueues()
        self._publisher = WeightPublisher(
            context.weights_folder,
            self._receivers,
            transport=transport,
            model_folder=context.model_folder,
            calls=self._calls,
            frozen=frozen,
            outage_s=OUTAGE_SHARE * self._stall_s,
        )
        self._push: Push | None = None
        self._behind: frozenset[str] = frozenset()
        self._named: set[str] = set()  # engines with a logged delay
        self._resumes: dict[str, Future[dict[str, Any]]] = {}  # engine url → its newest `resume_memory`

    def _receivers(self) -> list[EngineClient]:
        """Returns the engines that get a version, and forgets the engines that have left."""
        found = self._engines.reachable()
        for url in self._engines.left():
            self._publisher.forget(url)
            self._named.discard(url)
        return found

    @property
    def has_frozen(self) -> bool:
        """Returns whether the frozen weights were written. Until then `publish` needs them."""
        return self._publisher.has_frozen

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, factors: Iterable[LoraFactors] | None = None
    ) -> None:
        """Publishes the weights. The push runs in the background, so call `end_push` before the next version.

        ``factors`` are the LoRA factors of frozen weights, None without LoRA. They are read after ``tensors``.
        """
        self._push = self._publisher.publish(version, tensors, factors=factors)

    def end_push(self) -> SyncReport | None:
        """Waits for the end of the newest version's push. Returns None if no push is in progress."""
        if self._push is None:
            return None
        with self._waiting("the end of the newest weights' push", on="engine"):
            report, self._push = self._push.result(timeout=SILENT_S), None
        for url, why in report.refused.items():
            log.warning("weights %d: %s does not serve this version: %s", report.version, url, why)
            self._engines.forget(url)
        for url in report.behind - self._named:
            log.warning(
                "weights %d: %s has not answered within %g s; its owner sends it the newest weights when it answers",
                report.version,
                url,
                SILENT_S,
            )
        self._named |= report.behind
        self._behind = report.behind
        return report

    def release_memory(self, *, weights: bool = False) -> None:
        """Returns once every engine has released its memory or has died; for time sharing.

        The memory is that of the KV cache and, with ``weights``, that of the weights.
        """
        calls = self._all("to release their memory", lambda client: client.release_memory(weights=weights))
        resumes, self._resumes = self._resumes, {}  # each has ended, because the same engine's release came after it
        _check(resumes)
        _check(calls)

    def resume_weights(self) -> None:
        """Returns once every engine has memory for its weights again or has died; the next push fills it."""
        _check(self._all("to allocate the memory of their weights", lambda client: client.resume_weights()))

    def _all(self, what: str, method: Callable[[EngineClient], dict[str, Any]]) -> dict[str, Future[dict[str, Any]]]:
        """Calls a method of all engines and waits for the ends; raises EngineUnreachable if one is late."""
        calls = {
            client.url: self._calls.put(client.url, partial(method, client)) for client in self._engines.reachable()
        }
        with self._waiting(f"the engines {what}", on="engine"):
            _, late = wait(calls.values(), timeout=self._stall_s)
        if late:
            urls = ", ".join(url for url, call in calls.items() if call in late)
            raise EngineUnreachable(f"{urls}: asked {what}, no answer within run.stall_timeout_s={self._stall_s:g}")
        return calls

    def resume_memory(self) -> None:
        """Allows every engine to use its memory again; for time sharing."""
        self._resumes = {
            client.url: self._calls.put(client.url, client.resume_memory) for client in self._engines.reachable()
        }
        awaited = [call for url, call in self._resumes.items() if url not in self._behind]
        with self._waiting("the engines to resume their memory", on="engine"):
            wait(awaited, timeout=SILENT_S)
        _check({url: call for url, call in self._resumes.items() if call.done()})

    def close(self) -> None:
        """Ends the publisher."""
        self._publisher.close()


def _check(calls: Mapping[str, Future[dict[str, Any]]]) -> None:
    """Raises the error of a call that an engine rejected, because this engine has not released its memory.

    All calls must have ended. An unreachable engine has died and uses no memory; its owner restarts the engine.
    """
    failed: dict[str, EngineError] = {}
    for url, call in calls.items():
        try:
            call.result()
        except EngineError as error:
            failed[url] = error
    if failed:
        log.warning("%s", FanOut(answers=dict.fromkeys(calls.keys() - failed.keys()), failures=failed).describe())
    for why in failed.values():
        if not isinstance(why, EngineUnreachable):
            raise why
