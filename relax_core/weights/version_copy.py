"""Copies published versions into a folder that other machines can read, because the originals are in shared memory.

A version is copied only when such a server requests it. The copy of a version with LoRA factors has merged tensors,
because a server's own loader does not add factors.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from relax_core.contracts.engine import WeightManifest
from relax_core.contracts.private_folder import file_locked
from relax_core.weights.version_folder import LATEST, VersionFolder, read_latest, reading
from relax_core.weights.version_writer import FROZEN_FOLDER, WEIGHTS

LOCK = "copy.lock"


@contextmanager
def reading_copy(source: Path, target: Path, *, reader: str, deadline_s: float) -> Iterator[WeightManifest]:
    """Yields a copy, in ``target``, of the newest version in ``source``; the copy is not removed before the block ends.

    Makes the copy if it does not exist yet. For ``reader`` see `reading`. Several processes of one machine may call the
    function at the same time: one process copies, and the other processes wait for it. Raises OSError if the copy
    cannot be written, and TimeoutError (an OSError) after waiting ``deadline_s`` seconds.
    """
    with (
        file_locked(source / LOCK, deadline_s=deadline_s, makes=f"a copy of the weights in {target}"),
        reading(source, reader=reader) as newest,
    ):
        copied = read_latest(target)
        if copied is None or copied.version < newest.version:
            _copy(newest, target)
    with reading(target, reader=reader) as manifest:
        yield manifest


def _copy(newest: WeightManifest, target: Path) -> None:
    target.parent.mkdir(mode=0o700, exist_ok=True)  # the same mode as the folder of the published weights
    versions = VersionFolder(target)
    if newest.factors:
        copied = _merge(newest, versions.new(newest.version))
        versions.replace(LATEST, copied)
        versions.remove_old(keep=())
        return
    frozen = newest.frozen
    if frozen is not None:
        frozen = _in_folder(frozen, target / FROZEN_FOLDER)
        if not Path(frozen.path).exists():
            _copy_files(Path(newest.frozen.path).parent, target / FROZEN_FOLDER)  # type: ignore[union-attr]
    folder = versions.new(newest.version)
    published = Path(newest.path).parent
    _copy_files(published, folder)
    for link in (path for path in published.iterdir() if path.is_symlink()):
        source = link.readlink()
        of_frozen = source.parent.name == FROZEN_FOLDER and source.parent.parent == published.parent
        mine = folder / link.name
        if not mine.is_symlink():
            mine.symlink_to(target / FROZEN_FOLDER / source.name if of_frozen else source)
    versions.replace(LATEST, msgspec.structs.replace(_in_folder(newest, folder), frozen=frozen))
    versions.remove_old(keep=())


def _merge(newest: WeightManifest, folder: Path) -> WeightManifest:
    """Writes a version's merged tensors, and the files that the version links to, into ``folder``."""
    from relax_core.weights.version_file import read_weights, write_weights  # imports torch

    copied = write_weights(folder / WEIGHTS, version=newest.version, tensors=read_weights(newest))
    for link in (path for path in Path(newest.path).parent.iterdir() if path.is_symlink()):
        mine = folder / link.name
        if not mine.is_symlink():
            mine.symlink_to(link.readlink())
    return copied


def _in_folder(manifest: WeightManifest, folder: Path) -> WeightManifest:
    return msgspec.structs.replace(manifest, path=str(folder / Path(manifest.path).name))


def _copy_files(source: Path, target: Path) -> None:
    """Copies the files of a folder without its links. Each file appears in ``target`` only when it is complete."""
    target.mkdir(exist_ok=True)
    for path in (path for path in source.iterdir() if not path.is_symlink()):
        partial = target / f".{path.name}.partial"
        shutil.copyfile(path, partial)
        os.replace(partial, target / path.name)
