"""Computes a digest of the training data's content. A resumed run compares digests to check that the data is the same.

The digest does not depend on the paths and names of the files.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import xxhash

from relax_core.config.schema import DataConfig
from relax_core.contracts.algorithm import Offline
from relax_core.contracts.untrusted_files import open_regular
from relax_core.data.paths import data_files, data_parts
from relax_core.data.plugin_source import names_plugin, open_plugin_rows

WHOLE_BYTES = 256 << 20  # a larger file is read only in blocks of this total size
BLOCK_BYTES = 1 << 20
SETTLED_S = 0.1  # if a file's last write is older than this, its next change gets a different modification time
_known: dict[tuple[str, int, int, int], str] = {}


def data_digest(config: DataConfig, *, offline: Offline | None = None) -> str:
    """Returns the xxh3-128, in hex, of the training data's content.

    The digest covers the training files in order, their weights and the held-out file, or a plug-in's rows
    (`PluginRows.digest`); ``offline`` is their kind if they are trained without engines. It is empty for a generated
    task. Files are hashed as in `file_digest`. Raises ValueError as `data_parts` and `open_plugin_rows` do, and OSError
    for a file that cannot be read.
    """
    if config.task is not None:
        return ""
    hasher = xxhash.xxh3_128()
    if names_plugin(config):
        hasher.update(f"plug-in {open_plugin_rows(config, offline=offline).digest()}\n".encode())
    else:
        for part in data_parts(config):
            hasher.update(f"part {part.weight}\n".encode())
            for file in part.files:
                hasher.update(f"{file_digest(file)}\n".encode())
    if config.eval_path is not None:
        for file in data_files(config.eval_path, key="data.eval_path"):
            hasher.update(f"held out\n{file_digest(file)}\n".encode())
    return hasher.hexdigest()


def file_digest(path: Path) -> str:
    """Returns the xxh3-128, in hex, of a file's size and bytes.

    For a file above `WHOLE_BYTES`, only evenly spaced blocks of the file are hashed. A file that has not changed is
    read only once in this process.
    """
    stat = path.stat()
    key = (str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)
    if key in _known:
        return _known[key]
    hasher = xxhash.xxh3_128(f"{stat.st_size}\n".encode())
    with open_regular(path) as file:
        if stat.st_size <= WHOLE_BYTES:
            while block := file.read(BLOCK_BYTES):
                hasher.update(block)
        else:
            blocks = WHOLE_BYTES // BLOCK_BYTES
            for number in range(blocks):
                file.seek(number * (stat.st_size - BLOCK_BYTES) // (blocks - 1), os.SEEK_SET)
                hasher.update(file.read(BLOCK_BYTES))
    if time.time() - stat.st_mtime > SETTLED_S:
        _known[key] = hasher.hexdigest()
    return hasher.hexdigest()
