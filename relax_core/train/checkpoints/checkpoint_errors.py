"""What goes wrong with a checkpoint's files, in the words of those who can do something about it."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

_FULL_BYTES = 1 << 20  # a write that failed has filled the disk but for less than this
_UNREADABLE = (OSError, EOFError, ValueError, CheckpointException, pickle.UnpicklingError)


def _causes(error: BaseException) -> list[tuple[BaseException, traceback.StackSummary]]:
    """What failed, on each rank that says so, with where it was raised."""
    if isinstance(error, CheckpointException):
        return list(error.failures.values())
    return [(error, traceback.extract_tb(error.__traceback__))]


def _is_torch_file_error(error: BaseException, frames: traceback.StackSummary) -> bool:
    """torch's zip reader and writer raise RuntimeErrors, in many words, for what the disk refuses."""
    return isinstance(error, RuntimeError) and frames[-1].filename == torch.serialization.__file__


@contextmanager
def write_errors_as_oserror(folder: Path) -> Iterator[None]:
    """OSError for what the disk refused on any rank."""
    try:
        yield
    except (CheckpointException, RuntimeError) as error:
        for cause, frames in _causes(error):
            if isinstance(cause, OSError):
                raise OSError(cause.errno, f"{folder}: {cause.strerror}") from error
            if _is_torch_file_error(cause, frames):
                number = errno.ENOSPC if shutil.disk_usage(folder).free < _FULL_BYTES else errno.EIO
                raise OSError(number, f"{folder}: {os.strerror(number)}: {cause}") from error
        if isinstance(error, CheckpointException):  # no Exception: it would pass every handler
            raise RuntimeError(f"{folder}: {error}") from error
        raise


@contextmanager
def read_errors_as_valueerror(folder: Path) -> Iterator[None]:
    """ValueError for files that are not what was written."""
    try:
        yield
    except (RuntimeError, *_UNREADABLE) as error:
        cause, frames = _causes(error)[0]
        if not isinstance(error, _UNREADABLE) and not _is_torch_file_error(cause, frames):
            raise
        raise ValueError(
            f"checkpoint {folder} cannot be read: {type(cause).__name__}: {cause}. It is corrupt, or of another model. "
            "Go on from an older one with resume=<its folder>."
        ) from error
