"""Writes each weight version, pushes it to every engine, and keeps the newest version for engines that start later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.contracts.engine import EngineError, EngineUnreachable, WeightManifest
from relax_core.contracts.outage import Outage, retry_through_outage
from relax_core.weights.call_queues import CallQueues
from relax_core.weights.transports import WeightReceiver, WeightTransport
from relax_core.weights.version_folder import LATEST, PUSHED, VersionFolder
from relax_core.weights.version_writer import VersionWriter

if TYPE_CHECKING:
    import torch

STARTS = "starts of pushes"  # The queue that starts each version's push; all other queues are named by an engine's URL.
CLOSE_S = 1.0  # How many seconds `close` waits for pushes in progress.


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """Reports the pushes that have ended since the last report.

    ``write_ms`` is the time until the file and its digest existed. ``push_ms`` is the time of the longest push that has
    ended, or the time so far if none has. ``stall_ms`` is the longest time for which an engine stopped decoding for a
    new version. ``bytes`` is the size of the version without frozen tensors. ``refused`` maps an engine's url to the
    reason why it does not serve the version. ``behind`` are the engines that have not answered. The owners of all
    these engines bring them to the newest version.
    """

    version: int
    bytes: int
    write_ms: float
    push_ms: float
    stall_ms: float
    refused: dict[str, str]
    behind: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Holds the result of a push to one engine: ``stall_ms``, or why the engine does not serve the version."""

    url: str
    push_ms: float
    stall_ms: float = 0.0
    refusal: EngineError | None = None


class Push:
    """Holds a version that is being pushed to the engines."""

    def __init__(self, publisher: WeightPublisher, manifest: WeightManifest, *, write_ms: float) -> None:
        self.manifest = manifest
        self.write_ms = write_ms
        self.began = time.monotonic()
        self.started: Future[list[Future[_Outcome]]] = Future()  # one future for each engine that `result` waits for
        self._publisher = publisher

    def result(self, timeout: float) -> SyncReport:
        """Returns when every engine has answered, or ``timeout`` seconds after the push began.

        Engines that have not answered are in ``behind``. It does not wait for engines that were behind before. It
        raises any exception that is not an EngineError.
        """
        return self._publisher.report(self, until=self.began + timeout)


class WeightPublisher:
    """Publishes versions into ``folder`` and pushes them to each engine separately.

    An engine that does not answer delays no other engine and no later version. Until it answers a push it gets no other
    push, and its owner brings it to the newest version, as for an engine that refused a version.

    ``receivers`` is called for each version in another thread than `publish`. With ``model_folder`` a version is a
    folder that loads as a Hugging Face model, with links to that folder's config and tokenizer. The pushes run in
    ``calls`` under the engine's url; other calls that are put there run in order with the pushes.

    ``frozen`` names the tensors that are the same in every version. They are written once, into a file that all
    versions share, and an engine that holds them does not read them again. A transport that sends the tensors sends
    them with every version. The record of a push waits out outages of the disk of up to ``outage_s`` seconds.
    """

    def __init__(
        self,
        folder: Path,
        receivers: Callable[[], Sequence[WeightReceiver]],
        *,
        transport: WeightTransport,
        model_folder: Path | None = None,
        calls: CallQueues | None = None,
        frozen: Collection[str] = (),
        outage_s: float = 0.0,
    ) -> None:
        self._folder = VersionFolder(folder)
        self._receivers = receivers
        self._transport = transport
        self._writer = VersionWriter(folder, frozen=frozen if transport.by_file else (), model_folder=model_folder)
        self._calls = calls or CallQueues()
        self._lock = threading.Lock()  # guards the attributes below
        self._silent: frozenset[str] = frozenset()  # engines that were behind and have answered nothing since
        self._in_flight: dict[str, int] = {}  # engine url → the version that it has not answered
        self._unreported: list[Future[_Outcome]] = []
        self._pushed = -1
        self._outage_s = outage_s

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Push:
        """Writes a version and starts its push in other threads; take its result before you publish the next version.

        The tensors are read before this returns.
        """
        start = time.perf_counter()
        manifest = self._writer.write(self._folder.new(version), version, tensors)
        self._folder.replace(LATEST, manifest)
        with self._lock:
            being_read = set(self._in_flight.values())
        self._folder.remove_old(keep=being_read)
        push = Push(self, manifest, write_ms=1e3 * (time.perf_counter() - start))
        self._calls.put(STARTS, partial(self._start, push))
        return push

    def report(self, push: Push, *, until: float) -> SyncReport:
        """Returns the report of `Push.result`; ``until`` is in seconds of time.monotonic()."""
        with suppress(TimeoutError):  # The list of engines did not arrive in time.
            wait(push.started.result(max(0.0, until - time.monotonic())), timeout=max(0.0, until - time.monotonic()))
        with self._lock:
            behind = frozenset(self._in_flight)
            ended = [future for future in self._unreported if future.done()]
            self._unreported = [future for future in self._unreported if not future.done()]
            outcomes = [future.result() for future in ended]
            answered = {outcome.url for outcome in outcomes if not isinstance(outcome.refusal, EngineUnreachable)}
            self._silent = (self._silent | behind) - answered
        return SyncReport(
            version=push.manifest.version,
            bytes=push.manifest.total_bytes,
            write_ms=push.write_ms,
            push_ms=max((outcome.push_ms for outcome in outcomes), default=1e3 * (time.monotonic() - push.began)),
            stall_ms=max((outcome.stall_ms for outcome in outcomes), default=0.0),
            refused={outcome.url: str(outcome.refusal) for outcome in outcomes if outcome.refusal is not None},
            behind=behind,
        )

    def forget(self, url: str) -> None:
        """Forgets an engine that has left, once the push that may be in progress has ended, without waiting for it."""
        self._calls.put(url, partial(self._forget, url))

    # -- In other threads ---------------------------------------------------------------------------------------------
    def _start(self, push: Push) -> None:
        """Starts the push to each engine that has answered the previous push."""
        try:
            receivers = self._receivers()
        except BaseException as error:  # The reader of the push's result gets every exception.
            push.started.set_exception(error)
            return
        version, awaited = push.manifest.version, []
        with self._lock:
            free = [receiver for receiver in receivers if receiver.url not in self._in_flight]
            self._in_flight |= {receiver.url: version for receiver in free}
            for receiver in free:
                future = self._calls.put(receiver.url, partial(self._push_one, receiver, push))
                self._unreported.append(future)
                if receiver.url not in self._silent:
                    awaited.append(future)
        if not free:
            self._record_pushed(version)
        push.started.set_result(awaited)

    def _push_one(self, receiver: WeightReceiver, push: Push) -> _Outcome:
        stall_ms, refusal, version = 0.0, None, push.manifest.version
        try:
            stall_ms = float(self._transport.push(receiver, push.manifest)["stall_ms"])
        except EngineError as error:
            refusal = error
        finally:
            with self._lock:
                del self._in_flight[receiver.url]
                last = version not in self._in_flight.values()
            if last:
                self._record_pushed(version)
        push_ms = 1e3 * (time.monotonic() - push.began)
        return _Outcome(url=receiver.url, push_ms=push_ms, stall_ms=stall_ms, refusal=refusal)

    def _forget(self, url: str) -> None:
        self._transport.forget(url)
        with self._lock:
            self._silent -= {url}

    def _record_pushed(self, version: int) -> None:
        """Records the end of this version's push, so that owners know that it did not reach engines still behind."""

        def record() -> None:
            with self._lock:  # not held while an outage lasts, because the trainer needs it
                if version > self._pushed:  # The push of an older version may end later.
                    self._folder.replace(PUSHED, version)
                    self._pushed = version

        retry_through_outage(record, Outage(f"records the push of weights {version}"), limit_s=self._outage_s)

    def close(self) -> None:
        """Waits up to `CLOSE_S` seconds for the pushes in progress; the remaining pushes end with the process."""
        with self._lock:
            in_progress = list(self._unreported)
        wait(in_progress, timeout=CLOSE_S)
        self._transport.close()
