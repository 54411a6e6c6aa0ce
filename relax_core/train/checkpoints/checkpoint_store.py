"""The checkpoints of a run: whole folders with a meta.json, the newest few kept. No heavy imports.

<root>/step_00000100/meta.json, <what the writers wrote>
<root>/best -> step_00000100          the one with the best evaluation (run.keep_best)
<root>/.step_00000150.partial/        being written; never read
<root>/.step_00000100.replaced/       the older of two of the same step, for the moment in which they change places
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from relax_core.train.checkpoints.atomic_folder import (
    PARTIAL_SUFFIX,
    REPLACED_SUFFIX,
    atomic_folder,
    recover_replaced,
    sync,
)
from relax_core.weights.digested_json import decode_digested, encode_digested

META = "meta.json"
BUS_SNAPSHOT, CONFIG = "bus.msgpack", "config.yaml"  # what a run's checkpoint has beside the models
DATA_DIGEST = "data"  # in what a run tells of itself: of its data's content, where that is in files
DATUM = "datum"  # there too: the form of what the run's ledger and bus hold
TOKEN_TREE = "token tree"
BEST = "best"  # a link to the checkpoint with the best evaluation, where run.keep_best names a figure
SLOWEST_WRITE_S = 86_400.0  # for those who wait for a write; whether it goes on its progress tells
REMOVED_SUFFIX = ".removed"
LIBRARIES = ("torch", "megatron-core", "transformers", "ray", "numpy", "safetensors", "msgspec")
_READ_BYTES = 8 << 20
_ANEW = "Start anew with resume=null and another run.dir."
_STEP_NAME = re.compile(r"step_(\d{8,})")


class CheckpointDamaged(ValueError):
    """A checkpoint cannot be used as it is; the text says why, and what to resume from instead. ``problem``: why."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(f"checkpoint {folder}: {problem}. {_instead(folder)}")
        self.problem = problem


class FileDigest(msgspec.Struct, frozen=True, kw_only=True):
    """``digest``: xxh3-128 of the file's bytes, in hex."""

    bytes: int
    digest: str


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What meta.json holds, under a digest of its own.

    ``sequence``: order of writing, by which the newest is found: a run may go back to an older step.
    ``run``: what the writer told of its run, the digest of its configuration among it.
    """

    step: int
    sequence: int
    provenance: str
    libraries: dict[str, str]
    run: dict[str, Any]
    files: dict[str, FileDigest]


@dataclass(frozen=True, kw_only=True)
class WholeCheckpoint:
    """A checkpoint of which every file agrees with its digest. ``left``: why newer ones, and those whose place in the
    order of writing nobody can read, were left; a sentence each."""

    folder: Path
    meta: CheckpointMeta
    left: tuple[str, ...] = ()


class CheckpointStore:
    """One process writes; any may read at the same time. ``keep_last``: how many checkpoints stay, and beside them
    those of the train steps that ``kept`` names."""

    def __init__(self, root: Path, *, keep_last: int, kept: Callable[[], Collection[int]] = frozenset) -> None:
        if keep_last < 1:
            raise ValueError(f"run.keep_last={keep_last}: keep at least 1 checkpoint.")
        self._root = root
        self._keep_last = keep_last
        self._kept = kept
        self._settled = 0  # bytes that were digested, and bytes that are on disk

    def write(self, step: int, *, writers: Callable[[Path], None], meta: dict[str, Any]) -> Path:
        """Writes the checkpoint after ``step`` train steps, then removes the oldest beyond ``keep_last``.

        ``writers`` fills the folder it is given. Raises OSError (what, where, how many bytes are free) where the disk
        does not take it, and whatever ``writers`` raises; every older checkpoint is then as it was.
        """
        recover_replaced(self._root)
        self._remove_stale_runs()
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
        """Points ``best`` at the checkpoint after ``step`` train steps; nothing changes where there is none."""
        target = self._folder(step)
        if not (target / META).is_file():
            return
        link, partial = self._root / BEST, self._root / f".{BEST}"
        partial.unlink(missing_ok=True)
        partial.symlink_to(target.name)
        os.replace(partial, link)

    def progress(self, step: int) -> int:
        """A number that changes as long as the write of the checkpoint after ``step`` goes on, in whatever process its
        files grow: it stands still where the disk does. From any thread."""
        return self._settled + _size(self._folder(step, hidden=PARTIAL_SUFFIX))

    def newest_whole(self, *, requirements: Sequence[str] = ()) -> WholeCheckpoint | None:
        """The checkpoint written last of those that `verify` finds whole; None where there is no checkpoint at all.

        Reads the files of every checkpoint that it takes or leaves. Raises ValueError, which says what is wrong with
        each, where there are checkpoints and none of them is whole.
        """
        readable, left = self._by_sequence()
        for _, folder in reversed(readable):
            try:
                return WholeCheckpoint(
                    folder=folder, meta=self.verify(folder, requirements=requirements), left=tuple(left)
                )
            except CheckpointDamaged as damaged:
                left.append(f"{folder.name} is left: {damaged.problem}")
        if left:
            raise ValueError(f"no checkpoint in {self._root} is whole: {'; '.join(left)}. {_ANEW}")
        return None

    @staticmethod
    def read_meta(folder: Path) -> CheckpointMeta:
        """Reads a checkpoint's meta.json. Raises `CheckpointDamaged` where it is not there, does not agree with its own
        digest, or says another step than the folder's name."""
        path = folder / META
        try:
            meta = decode_digested(path.read_bytes(), type=CheckpointMeta)
        except FileNotFoundError:
            raise CheckpointDamaged(folder, f"{path} is not there") from None
        except (OSError, ValueError) as error:
            raise CheckpointDamaged(folder, f"{path} cannot be read: {error}") from error
        named = _STEP_NAME.fullmatch(folder.name)  # a copy may have any other name
        if named is not None and int(named[1]) != meta.step:
            raise CheckpointDamaged(folder, f"{path} says step {meta.step}, and its folder's name another one")
        return meta

    @staticmethod
    def verify(folder: Path, *, requirements: Sequence[str] = ()) -> CheckpointMeta:
        """Compares every file with its size and digest in meta.json, and meta.json with its own digest. Raises
        `CheckpointDamaged`, which names the first that differs, or the first of ``requirements`` that was never
        written.

        What was loaded after this is what was saved. Costs one pass over the files, at the speed of the disk.
        """
        meta = CheckpointStore.read_meta(folder)
        for name in requirements:
            if name not in meta.files:
                raise CheckpointDamaged(folder, f"{folder / name} is not there: it is no checkpoint of a whole run")
        for name, expected in meta.files.items():
            path = folder / name
            try:
                found = _digest(path)
            except OSError as error:
                raise CheckpointDamaged(folder, f"{path}: {error.strerror}") from error
            if found.bytes != expected.bytes:
                problem = f"has {found.bytes:,} bytes, was written with {expected.bytes:,}"
            elif found.digest != expected.digest:
                problem = f"is corrupt: digest {found.digest}, was written with {expected.digest}"
            else:
                continue
            raise CheckpointDamaged(folder, f"{path} {problem}")
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

    def _by_sequence(self) -> tuple[list[tuple[CheckpointMeta, Path]], list[str]]:
        """The checkpoints whose meta.json can be read, in the order of writing, and what is wrong with the others."""
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
            # Out of sight first, so that no reader finds half of it.
            doomed = folder.with_name(f".{folder.name}{REMOVED_SUFFIX}")
            folder.rename(doomed)
            shutil.rmtree(doomed)

    def _remove_stale_runs(self) -> None:
        for suffix in (PARTIAL_SUFFIX, REPLACED_SUFFIX, REMOVED_SUFFIX):
            for stale_run in self._root.glob(f".step_*{suffix}"):
                shutil.rmtree(stale_run)


def has_checkpoint(root: Path) -> bool:
    """Whether `recover_replaced` and `CheckpointStore.newest_whole` may find one in ``root``."""
    return any(any(root.glob(f"{name}/{META}")) for name in ("step_*", f".step_*{REPLACED_SUFFIX}"))


def _instead(folder: Path) -> str:
    """The other checkpoints beside ``folder``, newest step first, in words for the user."""
    others = sorted(
        (other for other in folder.parent.glob("step_*") if other != folder and (other / META).is_file()), reverse=True
    )
    if not others:
        return f"There is no other checkpoint in {folder.parent}. {_ANEW}"
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
