"""The checkpoints of a run: whole folders with a meta.json, the newest few kept. No heavy imports.

<root>/step_00000100/meta.json, <what the writers wrote>
<root>/.step_00000150.partial/        being written; never read
<root>/.step_00000100.replaced/       the older of two of the same step, for the moment in which they change places
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from relax_core.train.atomic_folder import PARTIAL_SUFFIX, REPLACED_SUFFIX, atomic_folder, recover_replaced, sync

META = "meta.json"
SLOWEST_WRITE_S = 86_400.0  # for those who wait for a write; whether it goes on its progress tells
REMOVED_SUFFIX = ".removed"
LIBRARIES = ("torch", "megatron-core", "transformers", "ray", "numpy", "safetensors", "msgspec")
_READ_BYTES = 8 << 20


class FileDigest(msgspec.Struct, frozen=True, kw_only=True):
    """``digest``: xxh3-128 of the file's bytes, in hex."""

    bytes: int
    digest: str


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What meta.json holds.

    ``sequence``: order of writing, by which the newest is found: a run may go back to an older step.
    ``run``: what the writer told of its run, the digest of its configuration among it.
    """

    step: int
    sequence: int
    made_by: str
    libraries: dict[str, str]
    run: dict[str, Any]
    files: dict[str, FileDigest]


class CheckpointStore:
    """One process writes; any may read at the same time. ``keep_last``: how many checkpoints stay."""

    def __init__(self, root: Path, *, keep_last: int) -> None:
        if keep_last < 1:
            raise ValueError(f"run.keep_last={keep_last}: keep at least 1 checkpoint.")
        self._root = root
        self._keep_last = keep_last
        self._settled = 0  # bytes that were digested, and bytes that are on disk

    def write(self, step: int, *, writers: Callable[[Path], None], meta: dict[str, Any]) -> Path:
        """Writes the checkpoint after ``step`` train steps, then removes the oldest beyond ``keep_last``.

        ``writers`` fills the folder it is given. Raises OSError (what, where, how many bytes are free) where the disk
        does not take it, and whatever ``writers`` raises; every older checkpoint is then as it was.
        """
        recover_replaced(self._root)
        self._remove_leftovers()
        valid = self._valid()
        target = self._folder(step)
        with atomic_folder(target) as folder:
            writers(folder)
            contents = CheckpointMeta(
                step=step,
                sequence=valid[-1][0].sequence + 1 if valid else 0,
                made_by=f"relax-core {_version('relax-core')}",
                libraries={library: _version(library) for library in LIBRARIES},
                run=meta,
                files={str(path.relative_to(folder)): self._settle(path) for path in _files(folder)},
            )
            (folder / META).write_bytes(msgspec.json.format(msgspec.json.encode(contents), indent=1))
        self._remove_oldest()
        return target

    def progress(self, step: int) -> int:
        """A number that changes as long as the write of the checkpoint after ``step`` goes on, in whatever process its
        files grow: it stands still where the disk does. From any thread."""
        return self._settled + _size(self._folder(step, hidden=PARTIAL_SUFFIX))

    def newest(self) -> Path | None:
        """The checkpoint written last; partial ones and those without a valid meta.json do not count."""
        valid = self._valid()
        return valid[-1][1] if valid else None

    @staticmethod
    def read_meta(folder: Path) -> CheckpointMeta:
        """Reads a checkpoint's meta.json; ValueError says what is wrong with it and what to resume from instead."""
        path = folder / META
        try:
            return msgspec.json.decode(path.read_bytes(), type=CheckpointMeta)
        except FileNotFoundError:
            raise ValueError(f"checkpoint {folder}: {path} is not there. {_instead(folder)}") from None
        except (OSError, msgspec.DecodeError) as error:
            raise ValueError(f"checkpoint {folder}: {path} cannot be read: {error}. {_instead(folder)}") from error

    @staticmethod
    def verify(folder: Path) -> CheckpointMeta:
        """Compares every file with its size and digest in meta.json; ValueError names the first that differs.

        What was loaded after this is what was saved. Costs one pass over the files, at the speed of the disk.
        """
        meta = CheckpointStore.read_meta(folder)
        for name, expected in meta.files.items():
            path = folder / name
            try:
                found = _digest(path)
            except OSError as error:
                raise ValueError(f"checkpoint {folder}: {path}: {error.strerror}. {_instead(folder)}") from error
            if found.bytes != expected.bytes:
                problem = f"has {found.bytes:,} bytes, was written with {expected.bytes:,}"
            elif found.digest != expected.digest:
                problem = f"is corrupt: digest {found.digest}, was written with {expected.digest}"
            else:
                continue
            raise ValueError(f"checkpoint {folder}: {path} {problem}. {_instead(folder)}")
        return meta

    def _folder(self, step: int, *, hidden: str = "") -> Path:
        name = f"step_{step:08d}"
        return self._root / (f".{name}{hidden}" if hidden else name)

    def _settle(self, path: Path) -> FileDigest:
        """Digests a file and puts it on disk."""
        digest = _digest(path, self._count)
        sync(path)
        self._count(digest.bytes)
        return digest

    def _count(self, settled: int) -> None:
        self._settled += settled

    def _valid(self) -> list[tuple[CheckpointMeta, Path]]:
        """In the order of writing."""
        found = []
        for folder in self._root.glob("step_*"):
            try:
                found.append((self.read_meta(folder), folder))
            except ValueError:
                continue
        return sorted(found, key=lambda pair: pair[0].sequence)

    def _remove_oldest(self) -> None:
        for _, folder in self._valid()[: -self._keep_last]:
            # Out of sight first, so that no reader finds half of it.
            doomed = folder.with_name(f".{folder.name}{REMOVED_SUFFIX}")
            folder.rename(doomed)
            shutil.rmtree(doomed)

    def _remove_leftovers(self) -> None:
        for suffix in (PARTIAL_SUFFIX, REPLACED_SUFFIX, REMOVED_SUFFIX):
            for leftover in self._root.glob(f".step_*{suffix}"):
                shutil.rmtree(leftover)


def has_checkpoint(root: Path) -> bool:
    """Whether `recover_replaced` and `CheckpointStore.newest` may find one in ``root``."""
    return any(any(root.glob(f"{name}/{META}")) for name in ("step_*", f".step_*{REPLACED_SUFFIX}"))


def _instead(folder: Path) -> str:
    """The other checkpoints beside ``folder``, newest step first, in words for the user."""
    others = sorted(
        (other for other in folder.parent.glob("step_*") if other != folder and (other / META).is_file()), reverse=True
    )
    if not others:
        return f"There is no other checkpoint in {folder.parent}; start anew with resume=null and another run.dir."
    return "Go on from another one: " + ", ".join(f"resume={other}" for other in others) + "."


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _size(folder: Path) -> int:
    """Of all files that are there; some may go, or be renamed, meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(Path(path, name)).st_size
    return total


def _digest(path: Path, told: Callable[[int], None] = lambda count: None) -> FileDigest:
    """``told``: called with the bytes of each piece."""
    hasher, count = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            hasher.update(block)
            count += len(block)
            told(len(block))
    return FileDigest(bytes=count, digest=hasher.hexdigest())


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
