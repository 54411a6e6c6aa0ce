"""Retries an action during a disk outage that may end by itself, and distinguishes outages from other errors.

Examples: a disk is full or mounted read-only for a while, a network disk is interrupted, or another program has locked
a database.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import TypeVar

RETRY_S = 1.0  # seconds between the starts of two attempts
OUTAGE_SHARE = 0.9  # fraction of run.stall_timeout_s; a longer outage ends the run, before services restart

_NUMBERS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE),
        *(errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY),
    }
)
_SQLITE_CODES = frozenset(
    {
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL),
        *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
    }
)
SQLITE_CODE_MASK = 0xFF  # bits of an extended SQLite code that contain its primary code

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})

T = TypeVar("T")
log = logging.getLogger(__name__)


def is_outage(error: BaseException) -> bool:
    """Returns whether repeating the action may succeed after this OSError or SQLite error."""
    if isinstance(error, sqlite3.OperationalError):
        return sqlite_code(error) in _SQLITE_CODES
    return isinstance(error, OSError) and error.errno in _NUMBERS


def is_exhausted(error: BaseException) -> bool:
    """Returns whether a process has no free file descriptor, memory or process left; another process may have some."""
    return isinstance(error, OSError) and error.errno in _EXHAUSTED


def sqlite_code(error: sqlite3.Error) -> int:
    """Returns the primary code of an SQLite error, 0 for an error that Python's sqlite3 module itself raised."""
    return int(getattr(error, "sqlite_errorcode", 0)) & SQLITE_CODE_MASK


class Outage:
    """Holds the cause and the start of the current outage. One thread may write; any thread may read.

    ``what`` names the file or the work that waits. The start and the end of an outage are logged as warnings, and
    ``report`` is called with a text after each failed attempt.
    """

    def __init__(self, what: str, *, report: Callable[[str], None] = lambda text: None) -> None:
        self._what, self._report = what, report
        self._now: tuple[str, float] | None = None  # (newest cause, monotonic time of the start)

    @property
    def problem(self) -> str:
        """Describes the outage, such as "No space left on device since 12 s"; "" without an outage."""
        now = self._now
        return "" if now is None else f"{now[0]} since {time.monotonic() - now[1]:.0f} s"

    @property
    def seconds(self) -> float:
        """Returns how long the outage has lasted, 0 without an outage."""
        now = self._now
        return 0.0 if now is None else time.monotonic() - now[1]

    def met(self, error: BaseException) -> None:
        """Records that an attempt failed because of an outage."""
        cause = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        if self._now is None:
            log.warning("%s waits for the disk: %s", self._what, cause)
        self._now = (cause, time.monotonic() if self._now is None else self._now[1])
        self._report(f"{self._what}: waits for the disk ({self.problem})")

    def over(self) -> None:
        """Records a successful attempt."""
        if self._now is not None:
            log.warning("%s goes on after %.1f s: %s", self._what, time.monotonic() - self._now[1], self._now[0])
            self._now = None


def retry_through_outage(
    action: Callable[[], T], outage: Outage, *, limit_s: float, given_up: threading.Event | None = None
) -> T:
    """Calls ``action`` every `RETRY_S` seconds until it no longer fails because of an outage. Returns its value.

    Raises the newest error when ``limit_s`` seconds have passed since the first error, or when ``given_up`` is set.
    Immediately raises errors of ``action`` that are no outage.
    """
    wait = threading.Event() if given_up is None else given_up
    first: float | None = None
    while True:
        began = time.monotonic()
        try:
            value = action()
        except (OSError, sqlite3.OperationalError) as error:
            if not is_outage(error):
                raise
            outage.met(error)
            first = began if first is None else first
            if time.monotonic() - first > limit_s or wait.wait(max(0.0, began + RETRY_S - time.monotonic())):
                raise
        else:
            outage.over()
            return value
