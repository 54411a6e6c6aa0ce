"""Unpacks compressed data files into temporary files without a name.

A compressed file of a few kilobytes may unpack to gigabytes, so the unpacked size is limited. The temporary file
disappears when the process closes it or ends.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

from relax_core.contracts.untrusted_files import open_regular

MAX_RATIO = 200  # most bytes of an unpacked file for each byte of the compressed file; text has 3 to 30
ALWAYS_BYTES = 64 << 20  # an unpacked file of this size is allowed with any ratio
_PIECE_BYTES = 1 << 20


class _Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


def unpacked(path: Path) -> BinaryIO:
    """Returns the unpacked content of a .gz or .zst file, in a temporary file at its start.

    Raises ValueError for a damaged file, for content above the limits, and for a disk with too little space.
    """
    with open_regular(path) as file:
        most = max(ALWAYS_BYTES, MAX_RATIO * os.fstat(file.fileno()).st_size)
        made: Any = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
        try:
            _unpack(path, _OPENERS[path.suffix](file), made, most)
        except BaseException:
            made.close()
            raise
    made.seek(0)
    opened: BinaryIO = made
    return opened


def _unpack(path: Path, source: _Source, made: IO[bytes], most: int) -> None:
    done = 0
    try:
        while piece := source.read(_PIECE_BYTES):
            done += len(piece)
            if done > most:
                raise ValueError(
                    f"data file {path}: it unpacks to more than {most / 1e6:.0f} MB, more than {MAX_RATIO} times its "
                    "size. If it is your own file, unpack it and name the unpacked file."
                )
            made.write(piece)
    except (EOFError, OSError, zlib.error) as error:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if free < _PIECE_BYTES:
            raise ValueError(
                f"data file {path}: {folder} has no space for its unpacked content. Set TMPDIR to a folder with space."
            ) from error
        raise ValueError(f"data file {path}: not a complete {path.suffix} file: {error}.") from error


def _gunzip(file: BinaryIO) -> _Source:
    return gzip.GzipFile(fileobj=file)


def _unzstd(file: BinaryIO) -> _Source:
    import pyarrow

    stream: _Source = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    return stream


_OPENERS: dict[str, Callable[[BinaryIO], _Source]] = {".gz": _gunzip, ".zst": _unzstd}
COMPRESSED = tuple(_OPENERS)
