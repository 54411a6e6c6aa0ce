"""Turns errors of reading and writing checkpoint files into errors that name the folder and the fix."""

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

_FULL_BYTES = 1 << 20  # After a write failed on a full disk, fewer bytes than this are free.
_UNREADABLE = (OSError, EOFError, ValueError, CheckpointException, pickle.UnpicklingError)


def _causes(error: BaseException) -> list[tuple[BaseException, traceback.StackSummary]]:
    """Returns each rank's error with the stack where it was raised."""
    if isinstance(error, CheckpointException):
        return list(error.failures.values())
    return [(error, traceback.extract_tb(error.__traceback__))]


def _is_torch_file_error(error: BaseException, frames: traceback.StackSummary) -> bool:
    """Returns True for RuntimeErrors of torch's zip reader and writer, which raise them when the disk fails."""
    return isinstance(error, RuntimeError) and frames[-1].filename == torch.serialization.__file__


@contextmanager
def write_errors_as_oserror(folder: Path) -> Iterator[None]:
    """Raises OSError if the disk failed on any rank."""
    try:
        yield
    except (CheckpointException, RuntimeError) as error:
        for cause, frames in _causes(error):
            if isinstance(cause, OSError):
                raise OSError(cause.errno, f"{folder}: {cause.strerror}") from error
            if _is_torch_file_error(cause, frames):
                number = errno.ENOSPC if shutil.disk_usage(folder).free < _FULL_BYTES else errno.EIO
                raise OSError(number, f"{folder}: {os.strerror(number)}: {cause}") from error
        if isinstance(error, CheckpointException):  # It is not an Exception, so handlers of Exception would miss it.
            raise RuntimeError(f"{folder}: {error}") from error
        raise


@contextmanager
def read_errors_as_valueerror(folder: Path) -> Iterator[None]:
    """Raises ValueError if files are not those that were written."""
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
