"""Writes a run's checkpoints as complete folders with a meta.json and keeps the newest few.

This module has no heavy imports.

<root>/step_00000100/meta.json and the writers' files
<root>/best -> step_00000100          the checkpoint with the best evaluation (run.keep_best)
<root>/.step_00000150.partial/        a checkpoint that is being written and is never read
<root>/.step_00000100.replaced/       the older checkpoint of a step while a new one replaces it
<root>/.step_00000050.removed/        an old checkpoint during its removal, or with a file that cannot be removed
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from relax_core.contracts.output_path import numbered
from relax_core.weights.version_folder import decode_digested, encode_digested

PARTIAL_SUFFIX = ".partial"
REPLACED_SUFFIX = ".replaced"
REMOVED_SUFFIX = ".removed"

log = logging.getLogger(__name__)


@contextmanager
def atomic_folder(target: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yields an empty folder next to ``target``; after the block the folder is synced and renamed to ``target``.

    With ``replace`` an older ``target`` is replaced. Without ``replace`` a ``target`` that has files is an OSError, so
    no file of the user is removed. If the block or the disk fails, the new folder is removed and the old folder stays.
    If the disk fails, the OSError names the target, the reason, and the number of free bytes there.
    """
    partial, replaced = (target.with_name(f".{target.name}{suffix}") for suffix in (PARTIAL_SUFFIX, REPLACED_SUFFIX))
    try:
        _settle(target, partial=partial, replaced=replaced)  # A killed process may have left both folders.
        partial.mkdir(parents=True)
        yield partial
        _sync_tree(partial)
        if replace and target.exists():
            os.rename(target, replaced)
        os.rename(partial, target)  # The kernel accepts only a missing target or an empty folder.
        sync(target.parent)
    except OSError as error:
        raise OSError(error.errno, _failure_text(target, error)) from error
    finally:
        _settle(target, partial=partial, replaced=replaced)


def recover_replaced(root: Path) -> None:
    """Restores the names of replaced folders in ``root`` after a process was killed during the replacement.

    A process may be killed between the two renames of `atomic_folder`. No process may be writing into ``root``.
    """
    for replaced in root.glob(f".*{REPLACED_SUFFIX}"):
        target = replaced.with_name(replaced.name.removeprefix(".").removesuffix(REPLACED_SUFFIX))
        if not target.exists():
            os.rename(replaced, target)


def _settle(target: Path, *, partial: Path, replaced: Path) -> None:
    """Keeps only ``target``: the new folder if it already has that name, otherwise the older folder."""
    if replaced.exists() and not target.exists():
        os.rename(replaced, target)
    for stale in (partial, replaced):
        if stale.exists():
            remove_folder(stale)


def remove_folder(folder: Path) -> None:
    """Removes an obsolete folder; if a part of it cannot be removed, logs a warning and continues.

    The folder is first renamed to ``.NAME.removed``, so no reader finds a partly removed folder and its old name is
    free. If a file is in use on another machine or protected, the folder keeps the new name, and a warning names the
    cause.
    """
    removed = folder
    if folder.suffix != REMOVED_SUFFIX:
        hidden = folder.with_name(f".{folder.name.removeprefix('.')}{REMOVED_SUFFIX}")
        removed = next(candidate for candidate in numbered(hidden, suffix=REMOVED_SUFFIX) if not candidate.exists())
        try:
            folder.rename(removed)
        except OSError as error:
            _warn(folder, str(error))
            return

    problems: list[str] = []

    def note(_: Callable[..., Any], path: str, why: tuple[type[BaseException], BaseException, Any]) -> None:
        if not isinstance(why[1], FileNotFoundError):  # another process may remove the same folder
            problems.append(f"{path}: {getattr(why[1], 'strerror', None) or why[1]}")

    shutil.rmtree(removed, onerror=note)
    if problems:
        _warn(removed, problems[0])  # The folders that contain that file cannot be removed either.


def unremoved(root: Path) -> list[Path]:
    """Returns the folders in ``root`` that `remove_folder` could not remove."""
    with suppress(FileNotFoundError):
        return sorted(root.glob(f".*{REMOVED_SUFFIX}"))
    return []


@cache
def _warn(folder: Path, why: str) -> None:
    """Logs each reason only once, although the removal is tried again at each checkpoint."""
    log.warning("%s cannot be removed and stays: %s", folder, why)


def _failure_text(target: Path, error: OSError) -> str:
    existing = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    return (
        f"{target} was not written: {error.strerror or error}. {free:,} bytes are free in {existing}. "
        "Older files are unchanged; free some space or choose another folder."
    )


def _sync_tree(folder: Path) -> None:
    """Syncs ``folder`` and every file and folder below it to disk."""
    for path, _, names in os.walk(folder):
        for name in names:
            sync(Path(path, name))
        sync(Path(path))


def sync(path: Path) -> None:
    """Syncs a file's bytes, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


META = "meta.json"
BUS_SNAPSHOT, CONFIG = "bus.msgpack", "config.yaml"  # A run's checkpoint has these files next to the models' folders.
DATA_DIGEST = "data"  # The key in ``CheckpointMeta.run`` for the digest of the data's content, if the data is in files.
DATUM = "datum"  # The key in ``CheckpointMeta.run`` for the data format of the ledger and the bus.
TOKEN_TREE = "token tree"
BEST = "best"  # The name of the link to the checkpoint with the best evaluation, if run.keep_best names a metric.
# The timeout in seconds of waits for a write; `CheckpointStore.progress` shows whether the write continues.
SLOWEST_WRITE_S = 86_400.0
LIBRARIES = ("torch", "megatron-core", "transformers", "ray", "numpy", "safetensors", "msgspec")
_READ_BYTES = 8 << 20
_ANEW = "Start anew with resume=null and another run.dir."
_STEP_NAME = re.compile(r"step_(\d{8,})")


class CheckpointDamaged(ValueError):
    """Reports an unusable checkpoint.

    The text names other checkpoints to resume from; ``problem`` is the reason.
    """

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(f"checkpoint {folder}: {problem}. {_instead(folder)}")
        self.problem = problem


class FileDigest(msgspec.Struct, frozen=True, kw_only=True):
    """Holds a file's size in bytes and the file's xxh3-128 digest in hex."""

    bytes: int
    digest: str


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the content of meta.json, which includes its own digest.

    ``sequence`` counts the checkpoints in the order of writing. It determines the newest checkpoint; the step cannot,
    because a run may resume from an older step. ``provenance`` is the version of Relax. ``run`` holds records about the
    run, such as the digest of the configuration.
    """

    step: int
    sequence: int
    provenance: str
    libraries: dict[str, str]
    run: dict[str, Any]
    files: dict[str, FileDigest]


@dataclass(frozen=True, kw_only=True)
class ValidCheckpoint:
    """Holds a checkpoint with files that all match their digests.

    ``left`` has one sentence with the reason for each skipped checkpoint (newer or unreadable).
    """

    folder: Path
    meta: CheckpointMeta
    left: tuple[str, ...] = ()


class CheckpointStore:
    """Writes and finds checkpoints in ``root``; one process writes, and any process may read at the same time.

    ``keep_last`` is the number of newest checkpoints that are kept. The checkpoints after the train steps in ``kept``
    stay, too.
    """

    def __init__(self, root: Path, *, keep_last: int, kept: Callable[[], Collection[int]] = frozenset) -> None:
        if keep_last < 1:
            raise ValueError(f"run.keep_last={keep_last}: keep at least 1 checkpoint.")
        self._root = root
        self._keep_last = keep_last
        self._kept = kept
        self._settled = 0  # the number of digested bytes plus the number of synced bytes

    def write(self, step: int, *, writers: Callable[[Path], None], meta: dict[str, Any]) -> Path:
        """Writes the checkpoint after ``step`` train steps, then removes the oldest checkpoints beyond ``keep_last``.

        ``writers`` is called with a folder and fills it. If the disk fails, raises OSError with the target, the reason
        and the free bytes. Errors of ``writers`` are raised, too. After an error all older checkpoints are unchanged.
        """
        recover_replaced(self._root)
        self._remove_stale_folders()
        earlier, _ = self._by_sequence()
        target = self._folder(step)
        with atomic_folder(target) as folder:
            writers(folder)
            contents = CheckpointMeta(
                step=step,
                sequence=earlier[-1][0].sequence + 1 if earlier else 0,
                provenance=f"relax-core {_version('relax-core')}",
                libraries={library: _version(library) for library in LIBRARIES},
                run=meta,
                files={str(path.relative_to(folder)): self._settle(path) for path in _files(folder)},
            )
            (folder / META).write_bytes(encode_digested(contents, indent=1))
        self._remove_oldest()
        return target

    def name_best(self, step: int) -> None:
        """Points ``best`` at the checkpoint after ``step`` train steps, if that checkpoint exists."""
        target = self._folder(step)
        if not (target / META).is_file():
            return
        link, partial = self._root / BEST, self._root / f".{BEST}"
        partial.unlink(missing_ok=True)
        partial.symlink_to(target.name)
        os.replace(partial, link)

    def newest_before(self, step: int) -> Path | None:
        """Returns the readable checkpoint of the newest train step up to ``step``, or None."""
        found = [(meta.step, folder) for meta, folder in self._by_sequence()[0] if meta.step <= step]
        return max(found, default=(0, None))[1]

    def progress(self, step: int) -> int:
        """Returns a number that changes while the checkpoint after ``step`` is being written by any process.

        The number stops changing when the disk stops. Any thread may call this method.
        """
        return self._settled + _size(self._folder(step, hidden=PARTIAL_SUFFIX))

    def newest_valid(self, *, requirements: Sequence[str] = ()) -> ValidCheckpoint | None:
        """Returns the newest written checkpoint among those that `verify` accepts, or None without checkpoints.

        It reads the files of every checkpoint that it accepts or skips. If all checkpoints are damaged, raises
        ValueError with the problem of each.
        """
        readable, left = self._by_sequence()
        for _, folder in reversed(readable):
            try:
                return ValidCheckpoint(
                    folder=folder, meta=self.verify(folder, requirements=requirements), left=tuple(left)
                )
            except CheckpointDamaged as damaged:
                left.append(f"{folder.name} is left: {damaged.problem}")
        if left:
            raise ValueError(f"no checkpoint in {self._root} is complete: {'; '.join(left)}. {_ANEW}")
        return None

    @staticmethod
    def read_meta(folder: Path) -> CheckpointMeta:
        """Reads a checkpoint's meta.json.

        Raises `CheckpointDamaged` if the file is missing, does not match its own digest, or has a different step than
        the folder's name.
        """
        path = folder / META
        try:
            meta = decode_digested(path.read_bytes(), type=CheckpointMeta)
        except FileNotFoundError:
            raise CheckpointDamaged(folder, f"{path} is not there") from None
        except (OSError, ValueError) as error:
            raise CheckpointDamaged(folder, f"{path} cannot be read: {error}") from error
        named = _STEP_NAME.fullmatch(folder.name)  # A copy of a checkpoint may have any name.
        if named is not None and int(named[1]) != meta.step:
            raise CheckpointDamaged(
                folder, f"{path} is of step {meta.step}, which is not the step of its folder's name"
            )
        return meta

    @staticmethod
    def verify(folder: Path, *, requirements: Sequence[str] = ()) -> CheckpointMeta:
        """Compares every file with its size and digest in meta.json, and meta.json with its own digest.

        Raises `CheckpointDamaged` for the first file that differs, or for the first file of ``requirements`` that was
        not written. The call reads all files once, at the speed of the disk.
        """
        meta = CheckpointStore.read_meta(folder)
        for name in requirements:
            if name not in meta.files:
                raise CheckpointDamaged(folder, f"{folder / name} is not there: the checkpoint is incomplete")
        for name, expected in meta.files.items():
            path = folder / name
            try:
                found = _digest(path)
            except OSError as error:
                raise CheckpointDamaged(folder, f"{path}: {error.strerror}") from error
            if found.bytes != expected.bytes:
                problem = f"has {found.bytes:,} bytes, but was written with {expected.bytes:,}"
            elif found.digest != expected.digest:
                problem = f"is corrupt: it has digest {found.digest}, but was written with {expected.digest}"
            else:
                continue
            raise CheckpointDamaged(folder, f"{path} {problem}")
        return meta

    def _folder(self, step: int, *, hidden: str = "") -> Path:
        name = f"step_{step:08d}"
        return self._root / (f".{name}{hidden}" if hidden else name)

    def _settle(self, path: Path) -> FileDigest:
        """Digests a file and syncs it to disk."""
        digest = _digest(path, self._count)
        sync(path)
        self._count(digest.bytes)
        return digest

    def _count(self, settled: int) -> None:
        self._settled += settled

    def _by_sequence(self) -> tuple[list[tuple[CheckpointMeta, Path]], list[str]]:
        """Returns readable checkpoints in the order of writing, and the problems of unreadable checkpoints."""
        readable, unreadable = [], []
        for folder in sorted(self._root.glob("step_*")):
            try:
                readable.append((self.read_meta(folder), folder))
            except CheckpointDamaged as damaged:
                unreadable.append(f"{folder.name} is left: {damaged.problem}")
        return sorted(readable, key=lambda pair: pair[0].sequence), unreadable

    def _remove_oldest(self) -> None:
        kept = self._kept()
        for folder in (folder for meta, folder in self._by_sequence()[0][: -self._keep_last] if meta.step not in kept):
            remove_folder(folder)

    def _remove_stale_folders(self) -> None:
        for suffix in (PARTIAL_SUFFIX, REPLACED_SUFFIX, REMOVED_SUFFIX):
            for stale in self._root.glob(f".step_*{suffix}"):
                remove_folder(stale)


def has_checkpoint(root: Path) -> bool:
    """Returns True if `recover_replaced` or `CheckpointStore.newest_valid` may find a checkpoint in ``root``."""
    return any(any(root.glob(f"{name}/{META}")) for name in ("step_*", f".step_*{REPLACED_SUFFIX}"))


def _instead(folder: Path) -> str:
    """Returns a text that tells the user the other checkpoints next to ``folder``, newest step first."""
    checkpoints = sorted(
        (
            checkpoint
            for checkpoint in folder.parent.glob("step_*")
            if checkpoint != folder and (checkpoint / META).is_file()
        ),
        reverse=True,
    )
    if not checkpoints:
        return f"There is no other checkpoint in {folder.parent}. {_ANEW}"
    return "Resume from another checkpoint: " + ", ".join(f"resume={checkpoint}" for checkpoint in checkpoints) + "."


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _size(folder: Path) -> int:
    """Returns the bytes of all files in the folder; files may be removed or renamed during the call."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(Path(path, name)).st_size
    return total


def _digest(path: Path, progress: Callable[[int], None] = lambda count: None) -> FileDigest:
    """Digests a file; calls ``progress`` with the number of bytes of each block."""
    hasher, count = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            hasher.update(block)
            count += len(block)
            progress(len(block))
    return FileDigest(bytes=count, digest=hasher.hexdigest())


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
