"""Writes each weight version, pushes it to all engines, and keeps the newest version for engines that start later."""

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

    from relax_core.weights.lora_merge import LoraFactors

STARTS = "starts of pushes"  # The key of the queue that starts pushes; the other keys are engine URLs.
CLOSE_S = 1.0  # Seconds that `close` waits for pushes in progress.


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """Reports the pushes that have ended since the last report.

    ``write_ms`` is the time for writing the file and its digest. ``push_ms`` is the duration of the longest ended push,
    or the time since the push of ``version`` began if no push has ended. ``stall_ms`` is the longest time that an
    engine stopped decoding to load a version. ``bytes`` is the size of the version without frozen tensors. ``refused``
    maps the url of each engine with a failed push to the reason. ``behind`` has the urls of the engines that have not
    answered yet. Engine owners (`relax_core.roles.engine_owner`) bring refused and late engines to the newest version.
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
    """Holds the result of a push to one engine: ``stall_ms``, or ``refusal``, the reason why the push failed."""

    url: str
    push_ms: float
    stall_ms: float = 0.0
    refusal: EngineError | None = None


class Push:
    """Represents the push of one version to all engines."""

    def __init__(self, publisher: WeightPublisher, manifest: WeightManifest, *, write_ms: float) -> None:
        self.manifest = manifest
        self.write_ms = write_ms
        self.began = time.monotonic()
        self.started: Future[list[Future[_Outcome]]] = Future()  # one future per engine that `result` waits for
        self._publisher = publisher

    def result(self, timeout: float) -> SyncReport:
        """Returns the report when all engines have answered, but at most ``timeout`` seconds after the push began.

        Engines that have not answered are in ``SyncReport.behind``. `result` does not wait for engines that were
        already behind in an earlier report. Exceptions other than EngineError are raised.
        """
        return self._publisher.report(self, until=self.began + timeout)


class WeightPublisher:
    """Publishes versions into ``folder`` and pushes them to each engine separately.

    An unresponsive engine delays neither other engines nor later versions. It gets no further push until it has
    answered the current push. If an engine is unresponsive or refuses a version, its engine owner brings it to the
    newest version.

    ``receivers`` returns the engines. It is called once for each version, in a separate thread. With ``model_folder``,
    each version is a folder that loads as a Hugging Face model and links to the config and tokenizer in
    ``model_folder``. ``calls`` has one queue per engine url; pushes wait in this queue in order with other calls to the
    engine.

    ``frozen`` names the tensors that are the same in every version. They are written once, into a file that all
    versions share, and an engine reads them once. A collective transport sends them with every version. With LoRA,
    ``frozen`` names the tensors of the base model, and a version has only the factors (`takes_factors`). If the disk
    fails while the end of a push is recorded, the write is retried for up to ``outage_s`` seconds.
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
        self._silent: frozenset[str] = frozenset()  # engines that were behind and have not answered since
        self._in_flight: dict[str, int] = {}  # engine url → the version of the push that the engine has not answered
        self._unreported: list[Future[_Outcome]] = []
        self._pushed = -1
        self._outage_s = outage_s

    @property
    def takes_factors(self) -> bool:
        """Returns whether a version may have LoRA factors: the engines read the files, so `read_weights` merges."""
        return self._transport.by_file

    @property
    def has_frozen(self) -> bool:
        """Returns whether the frozen tensors were written, so that `publish` does not need them any more."""
        return self._writer.has_frozen

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        factors: Iterable[LoraFactors] | None = None,
    ) -> Push:
        """Writes a version and starts its push in other threads. Read the push's result before the next `publish`.

        ``factors`` are the LoRA factors of frozen tensors, None without LoRA. All tensors, then all factors, are read
        before the method returns.
        """
        assert factors is None or self.takes_factors, "engines that receive tensors need merged tensors"
        start = time.perf_counter()
        manifest = self._writer.write(self._folder.new(version), version, tensors, factors=factors)
        self._folder.replace(LATEST, manifest)
        with self._lock:
            being_read = set(self._in_flight.values())
        self._folder.remove_old(keep=being_read)
        push = Push(self, manifest, write_ms=1e3 * (time.perf_counter() - start))
        self._calls.put(STARTS, partial(self._start, push))
        return push

    def report(self, push: Push, *, until: float) -> SyncReport:
        """Returns the report of `Push.result`. ``until`` is the deadline on the clock time.monotonic()."""
        with suppress(TimeoutError):  # ``receivers`` did not return in time.
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
        """Returns at once. Releases the resources of a removed engine when its push in progress has ended."""
        self._calls.put(url, partial(self._forget, url))

    # -- In other threads ---------------------------------------------------------------------------------------------
    def _start(self, push: Push) -> None:
        """Starts the push to each engine that has answered its previous push."""
        try:
            receivers = self._receivers()
        except BaseException as error:  # `Push.result` raises the exception.
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
        """Records the end of this version's push. Engine owners then know that late engines did not get the version."""

        def record() -> None:
            with self._lock:  # The trainer needs the lock, so it is not held during an outage.
                if version > self._pushed:  # The push of an older version may end after this push.
                    self._folder.replace(PUSHED, version)
                    self._pushed = version

        retry_through_outage(record, Outage(f"records the push of weights {version}"), limit_s=self._outage_s)

    def close(self) -> None:
        """Waits up to `CLOSE_S` seconds for the pushes in progress. Pushes that take longer end with the process."""
        with self._lock:
            in_progress = list(self._unreported)
        wait(in_progress, timeout=CLOSE_S)
        self._transport.close()
