"""Encodes images, videos and sounds in parallel, in worker processes that can be killed."""

from __future__ import annotations

import asyncio
import logging
import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from relax_core.contracts.child_process import ChildLost, WorkerProcess
from relax_core.contracts.media import MediaError, MediaItem, MediaKind, MediaReason, MediaSource
from relax_core.data.media.media_limits import MediaLimits
from relax_core.families.architecture import AudioSettings, PatchSettings


class EncodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the settings of a worker: ``root`` is data.media_root, and ``folder`` is the output folder for items.

    ``tower`` and ``audio`` may be complete tower objects; only their settings are sent to the worker. ``audio`` is None
    for a model without audio input. With ``audio_in_video`` a video and its sound are one item.
    """

    model_folder: str
    tower: PatchSettings
    limits: MediaLimits
    root: str
    folder: str
    audio: AudioSettings | None = None
    audio_in_video: bool = False


class EncodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Names a source. For a source without a path, the ``data_bytes`` raw bytes of its content follow the message."""

    kind: MediaKind
    path: str | None
    data_bytes: int


class EncodeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the item, or the reason and the text of the refusal."""

    item: MediaItem | None = None
    word: MediaReason | None = None
    text: str = ""


log = logging.getLogger(__name__)
_MAIN = "relax_core.data.media.encode_worker_main"


class EncodePool:
    """Encodes sources in ``workers`` child processes, one source at a time in each.

    A worker that dies, or takes longer than ``settings.limits.worker_timeout_s`` seconds for an item, is replaced. An
    item that took too long is refused. After the death of its worker an item is retried once, because the item may not
    be the cause. If the next worker dies too, the item is refused. The media folder must exist.
    """

    def __init__(self, settings: EncodeSettings, *, workers: int, log_file: Path | None = None) -> None:
        self._timeout_s = settings.limits.worker_timeout_s
        audio = None if settings.audio is None else settings.audio.alone()
        settings = msgspec.structs.replace(settings, tower=settings.tower.alone(), audio=audio)
        self.workers = [
            WorkerProcess([_MAIN], settings, name="encoding of media", log=log_file) for _ in range(workers)
        ]
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in self.workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="encode")

    async def encode(self, source: MediaSource) -> MediaItem:
        """Encodes a source into a file in the media folder, and returns the item.

        Raises MediaError if the source is refused, and RuntimeError if a worker cannot start or the pool was closed.
        """
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._in_worker, source)
        if answer.item is not None:
            return answer.item
        assert answer.word is not None, "an answer has an item or a reason"
        raise MediaError(source.kind, answer.word, answer.text)

    def _in_worker(self, source: MediaSource) -> EncodeAnswer:
        data = source.data or b""
        request = EncodeRequest(kind=source.kind, path=source.path, data_bytes=len(data))
        worker = self._idle.get_nowait()  # never empty, because there are as many threads as workers
        try:
            answer = self._ask(worker, request, data)
        except ChildLost as lost:
            text = f"{source.description}: {lost}"
            return EncodeAnswer(word="timeout" if lost.late else "worker_killed", text=text)
        finally:
            self._idle.put(worker)
        return msgspec.msgpack.decode(answer, type=EncodeAnswer)

    def _ask(self, worker: WorkerProcess, request: EncodeRequest, data: bytes) -> bytes:
        """Returns the worker's answer. Raises `ChildLost` if the worker is late or dies twice."""
        try:
            return worker.ask(request, limit_s=self._timeout_s, content=data)
        except ChildLost as lost:
            if lost.late:
                raise
            log.warning("%s; the item is encoded again by another worker", lost)
            return worker.ask(request, limit_s=self._timeout_s, content=data)

    def close(self) -> None:
        """Ends all workers; may be called twice.

        Items that are not encoded yet are refused or raise RuntimeError.
        """
        for worker in self.workers:
            worker.stop()
        self._threads.shutdown(wait=True)  # items that still wait for a worker get a stopped worker
        for worker in self.workers:
            worker.close_pipes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
