"""The trainer's end of weight sync: write version t, tell every engine, leave the newest for whoever starts later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from relax_core.contracts.engine import EngineError, WeightManifest

if TYPE_CHECKING:
    import torch

KEPT_VERSIONS = 2  # a reader that has just read the newest manifest must still find its file
LATEST = "latest.json"


class WeightReceiver(Protocol):
    url: str

    def update_weights(self, manifest: WeightManifest) -> dict: ...


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """``write_ms``: until the file and its digest were there; ``push_ms``: until the last engine had answered;
    ``refused``: engine url → why it does not serve this version."""

    version: int
    bytes: int
    write_ms: float
    push_ms: float
    refused: dict[str, str]


def read_latest(folder: Path) -> WeightManifest | None:
    """The newest published version, or None before the first."""
    try:
        data = (folder / LATEST).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=WeightManifest)


class WeightPublisher:
    """Publishes versions into ``folder`` and pushes them. A receiver that fails is named and left to its owner, which
    brings it up to the newest version when it is back; nobody waits for it past its own deadline."""

    def __init__(self, folder: Path, receivers: Callable[[], Sequence[WeightReceiver]]) -> None:
        self._folder = folder
        self._receivers = receivers
        self._files: list[Path] = []
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="weight-push")
        folder.mkdir(parents=True, exist_ok=True)

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Future[SyncReport]:
        """Writes a version and starts its push, which ends beside the caller; one push at a time, so take the result
        before the next version. The tensors are read before this returns."""
        from relax_core.weights.files import write_weights  # here: who only reads the newest manifest needs no torch

        start = time.perf_counter()
        path = self._folder / f"weights-{version:08d}.bin"
        manifest = write_weights(path, version=version, tensors=tensors)
        partial = self._folder / (LATEST + ".partial")
        partial.write_bytes(msgspec.json.encode(manifest))
        os.replace(partial, self._folder / LATEST)
        self._files.append(path)
        while len(self._files) > KEPT_VERSIONS:
            self._files.pop(0).unlink(missing_ok=True)
        write_ms = 1e3 * (time.perf_counter() - start)
        return self._pool.submit(self._push, manifest, write_ms=write_ms)

    def _push(self, manifest: WeightManifest, *, write_ms: float) -> SyncReport:
        start = time.perf_counter()
        receivers = self._receivers()
        if len(receivers) == 1:
            outcomes = [_push_one(receivers[0], manifest)]
        else:
            outcomes = list(self._pool.map(lambda receiver: _push_one(receiver, manifest), receivers))
        return SyncReport(
            version=manifest.version,
            bytes=manifest.total_bytes,
            write_ms=write_ms,
            push_ms=1e3 * (time.perf_counter() - start),
            refused={
                receiver.url: outcome
                for receiver, outcome in zip(receivers, outcomes, strict=True)
                if outcome is not None
            },
        )

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def _push_one(receiver: WeightReceiver, manifest: WeightManifest) -> str | None:
    try:
        receiver.update_weights(manifest)
    except EngineError as error:
        return str(error)
    return None
