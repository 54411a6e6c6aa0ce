"""The trainer's end of weight sync: write version t, push it to every engine, leave the newest for who starts later."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from relax_core.contracts.engine import EngineError, WeightManifest
from relax_core.weights.digested_json import decode_digested, encode_digested
from relax_core.weights.transports.base import WeightReceiver, WeightTransport

if TYPE_CHECKING:
    import torch

KEPT_VERSIONS = 2  # a reader that has just read the newest manifest must still find its file
LATEST = "latest.json"
PUSHED = "pushed.json"
WEIGHTS = "model.safetensors"
READS = 5  # of a file that looks damaged: a network's file system may show half of one that was just replaced
READ_AGAIN_S = 0.1
COMPANIONS = {".json", ".txt", ".model", ".jinja"}  # config, tokenizer, chat template


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """``write_ms``: until the file and its digest were there; ``push_ms``: until the last engine had answered;
    ``stall_ms``: the longest that an engine's decoding stood still for it; ``refused``: engine url → why it does not
    serve this version."""

    version: int
    bytes: int
    write_ms: float
    push_ms: float
    stall_ms: float
    refused: dict[str, str]


class PublishedUnreadable(RuntimeError):
    """A file of the folder of published weights is damaged; the text names it."""


Content = TypeVar("Content")


def read_latest(folder: Path) -> WeightManifest | None:
    """The newest published version, or None before the first. Raises `PublishedUnreadable` where the file that says so
    is damaged, also when it is read again."""
    return _read(folder / LATEST, type=WeightManifest)


def read_pushed(folder: Path) -> int:
    """The newest version whose push has ended, well or not; -1 before the first. Raises as `read_latest` does."""
    pushed = _read(folder / PUSHED, type=int)
    return -1 if pushed is None else pushed


def _read(path: Path, *, type: type[Content]) -> Content | None:
    for attempt in range(READS):
        if attempt:
            time.sleep(READ_AGAIN_S)
        try:
            return decode_digested(path.read_bytes(), type=type)
        except FileNotFoundError:
            return None
        except ValueError as damaged:
            problem = damaged
    raise PublishedUnreadable(
        f"{path} is damaged: {problem}. The next version of the weights replaces it."
    ) from problem


class WeightPublisher:
    """Publishes versions into ``folder`` and pushes them. A receiver that fails is named and left to its owner, which
    brings it up to the newest version once the push has ended; nobody waits for it past its own deadline.

    A version is a folder that loads as a Hugging Face model where ``model_folder`` is given, whose config and tokenizer
    it links to.
    """

    def __init__(
        self,
        folder: Path,
        receivers: Callable[[], Sequence[WeightReceiver]],
        *,
        transport: WeightTransport,
        model_folder: Path | None = None,
    ) -> None:
        self._folder = folder
        self._receivers = receivers
        self._transport = transport
        self._companions = [path for path in model_folder.iterdir() if _is_companion(path)] if model_folder else []
        self._versions: list[Path] = []
        self._header_room: int | None = None
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="weight-push")
        folder.mkdir(parents=True, exist_ok=True)

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Future[SyncReport]:
        """Writes a version and starts its push, which ends beside the caller; one push at a time, so take the result
        before the next version. The tensors are read before this returns."""
        from relax_core.weights.files import HEADER_ROOM, write_weights  # who only reads the newest needs no torch

        start = time.perf_counter()
        home = self._folder / f"{version:08d}"
        home.mkdir(exist_ok=True)
        room = self._header_room or HEADER_ROOM
        manifest = write_weights(home / WEIGHTS, version=version, tensors=tensors, header_room=room)
        self._header_room = manifest.data_offset
        for companion in self._companions:
            link = home / companion.name
            if not link.is_symlink():
                link.symlink_to(companion)
        self._replace(LATEST, manifest)
        self._versions.append(home)
        while len(self._versions) > KEPT_VERSIONS:
            shutil.rmtree(self._versions.pop(0), ignore_errors=True)  # a cluster's disk may still hold an open file
        write_ms = 1e3 * (time.perf_counter() - start)
        return self._pool.submit(self._push, manifest, write_ms=write_ms)

    def _push(self, manifest: WeightManifest, *, write_ms: float) -> SyncReport:
        start = time.perf_counter()
        receivers = self._receivers()
        if len(receivers) == 1:
            outcomes = [self._push_one(receivers[0], manifest)]
        else:
            outcomes = list(self._pool.map(lambda receiver: self._push_one(receiver, manifest), receivers))
        self._replace(PUSHED, manifest.version)
        return SyncReport(
            version=manifest.version,
            bytes=manifest.total_bytes,
            write_ms=write_ms,
            push_ms=1e3 * (time.perf_counter() - start),
            stall_ms=max((stall for stall in outcomes if isinstance(stall, float)), default=0.0),
            refused={
                receiver.url: outcome
                for receiver, outcome in zip(receivers, outcomes, strict=True)
                if isinstance(outcome, str)
            },
        )

    def _push_one(self, receiver: WeightReceiver, manifest: WeightManifest) -> float | str:
        """How many milliseconds its decoding stood still, or why it does not serve the version."""
        try:
            return float(self._transport.push(receiver, manifest)["stall_ms"])
        except EngineError as error:
            return str(error)

    def _replace(self, name: str, content: object) -> None:
        """Whole or not at all."""
        partial = self._folder / f"{name}.partial"
        partial.write_bytes(encode_digested(content))
        os.replace(partial, self._folder / name)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._transport.close()


def _is_companion(path: Path) -> bool:
    return path.suffix in COMPANIONS and not path.name.endswith(".index.json")
