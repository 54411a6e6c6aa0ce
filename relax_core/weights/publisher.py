"""The trainer's end of weight sync: write version t, push it to every engine, leave the newest for who starts later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.contracts.engine import EngineError, EngineUnreachable, WeightManifest
from relax_core.weights.call_queues import CallQueues
from relax_core.weights.transports.base import WeightReceiver, WeightTransport
from relax_core.weights.version_folder import LATEST, PUSHED, VersionFolder

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"
COMPANIONS = {".json", ".txt", ".model", ".jinja"}  # config, tokenizer, chat template
STARTS = "starts of pushes"  # the queue of what begins each version's push; all others are named by a URL
CLOSE_S = 1.0  # how long pushes that are under way at the end are waited for


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What has come of pushes since the last report. ``write_ms``: until the file and its digest were there;
    ``push_ms``: of the longest push that has ended, or until now where none has; ``stall_ms``: the longest that an
    engine's decoding stood still for a new version; ``refused``: engine url → why it does not serve the version that
    was pushed; ``behind``: engines that have not answered. Their owners bring them to the newest version.
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
    """What became of a push to one engine, after ``push_ms``: ``stall_ms``, or why it does not serve the version."""

    url: str
    push_ms: float
    stall_ms: float = 0.0
    refusal: EngineError | None = None


class Push:
    """One version on its way to the engines."""

    def __init__(self, publisher: WeightPublisher, manifest: WeightManifest, *, write_ms: float) -> None:
        self.manifest = manifest
        self.write_ms = write_ms
        self.began = time.monotonic()
        self.started: Future[list[Future[_Outcome]]] = Future()  # one for each engine that is waited for
        self._publisher = publisher

    def result(self, timeout: float) -> SyncReport:
        """Returns once every engine has answered, or ``timeout`` seconds after the push began, with those that have not
        in ``behind``. An engine that was behind before is not waited for. Raises what is no engine's failure."""
        return self._publisher.report(self, until=self.began + timeout)


class WeightPublisher:
    """Publishes versions into ``folder`` and pushes them to each engine on its own: an engine that does not answer
    holds up no other engine and no later version. While it has not answered a push it gets no other one. Its owner
    brings it to the newest version, as it does for an engine that refused one.

    ``receivers`` is called for each version, beside the caller of `publish`. A version is a folder that loads as a
    Hugging Face model where ``model_folder`` is given, whose config and tokenizer it links to. ``calls``: where the
    pushes run, by the engine's url; who puts other calls there has them made in order with the pushes.
    """

    def __init__(
        self,
        folder: Path,
        receivers: Callable[[], Sequence[WeightReceiver]],
        *,
        transport: WeightTransport,
        model_folder: Path | None = None,
        calls: CallQueues | None = None,
    ) -> None:
        self._folder = VersionFolder(folder)
        self._receivers = receivers
        self._transport = transport
        self._companions = [path for path in model_folder.iterdir() if _is_companion(path)] if model_folder else []
        self._calls = calls or CallQueues()
        self._header_room: int | None = None
        self._silent: frozenset[str] = frozenset()  # engines that were behind and have answered nothing since
        self._lock = threading.Lock()  # of what stands below
        self._in_flight: dict[str, int] = {}  # engine url → the version that it has not answered
        self._unreported: list[Future[_Outcome]] = []
        self._pushed = -1

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Push:
        """Writes a version and starts its push, which ends beside the caller; take the result before the next version.
        The tensors are read before this returns."""
        from relax_core.weights.version_file import (  # who only reads the newest needs no torch
            HEADER_ROOM,
            write_weights,
        )

        start = time.perf_counter()
        home = self._folder.new(version)
        room = self._header_room or HEADER_ROOM
        manifest = write_weights(home / WEIGHTS, version=version, tensors=tensors, header_room=room)
        self._header_room = manifest.data_offset
        for companion in self._companions:
            link = home / companion.name
            if not link.is_symlink():
                link.symlink_to(companion)
        self._folder.replace(LATEST, manifest)
        with self._lock:
            being_read = set(self._in_flight.values())
        self._folder.remove_old(keep=being_read)
        push = Push(self, manifest, write_ms=1e3 * (time.perf_counter() - start))
        self._calls.put(STARTS, partial(self._start, push))
        return push

    def report(self, push: Push, *, until: float) -> SyncReport:
        """See `Push.result`; ``until`` in seconds of time.monotonic()."""
        with suppress(TimeoutError):  # nobody has said in time which engines there are
            wait(push.started.result(max(0.0, until - time.monotonic())), timeout=max(0.0, until - time.monotonic()))
        with self._lock:
            behind = frozenset(self._in_flight)
            ended = [future for future in self._unreported if future.done()]
            self._unreported = [future for future in self._unreported if not future.done()]
        outcomes = [future.result() for future in ended]
        answered = {one.url for one in outcomes if not isinstance(one.refusal, EngineUnreachable)}
        self._silent = (self._silent | behind) - answered
        return SyncReport(
            version=push.manifest.version,
            bytes=push.manifest.total_bytes,
            write_ms=push.write_ms,
            push_ms=max((one.push_ms for one in outcomes), default=1e3 * (time.monotonic() - push.began)),
            stall_ms=max((one.stall_ms for one in outcomes), default=0.0),
            refused={one.url: str(one.refusal) for one in outcomes if one.refusal is not None},
            behind=behind,
        )

    # -- beside the caller --------------------------------------------------------------------------------------------
    def _start(self, push: Push) -> None:
        """Begins the push to each engine that has answered the one before."""
        try:
            receivers = self._receivers()
        except BaseException as error:  # the caller of `publish` takes it with the push's result
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
            self._note_pushed(version)
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
                self._note_pushed(version)
        push_ms = 1e3 * (time.monotonic() - push.began)
        return _Outcome(url=receiver.url, push_ms=push_ms, stall_ms=stall_ms, refusal=refusal)

    def _note_pushed(self, version: int) -> None:
        """Tells the engines' owners that this version's push has ended: whoever is behind was not reached by it."""
        with self._lock:
            if version > self._pushed:  # that of an older version may end after it
                self._pushed = version
                self._folder.replace(PUSHED, version)

    def close(self) -> None:
        """Waits a moment for the pushes under way. Those that have not ended then end with the process."""
        with self._lock:
            under_way = list(self._unreported)
        wait(under_way, timeout=CLOSE_S)
        self._transport.close()


def _is_companion(path: Path) -> bool:
    return path.suffix in COMPANIONS and not path.name.endswith(".index.json")
