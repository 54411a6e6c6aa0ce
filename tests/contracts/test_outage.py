"""Tests outages: detection, the wait for their end with a time limit, and log lines at their start and end."""

from __future__ import annotations

import errno
import logging
import math
import sqlite3
import threading

import pytest

from relax_core.contracts import outage
from relax_core.contracts.outage import Outage, is_outage, retry_through_outage

FULL = OSError(errno.ENOSPC, "No space left on device")


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("of a test")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.EROFS, "read-only"),
        TimeoutError(errno.ETIMEDOUT, "of a network disk"),
        sqlite_error(sqlite3.SQLITE_BUSY),
        sqlite_error(sqlite3.SQLITE_BUSY_SNAPSHOT),
        sqlite_error(sqlite3.SQLITE_FULL),
        sqlite_error(sqlite3.SQLITE_IOERR_WRITE),
        sqlite_error(sqlite3.SQLITE_READONLY),
    ],
)
def test_a_temporary_error_is_an_outage(error: Exception) -> None:
    assert is_outage(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "no file"),
        TimeoutError("a wait of our own"),
        ValueError("a value"),
        sqlite_error(sqlite3.SQLITE_ERROR),
        sqlite3.OperationalError("of Python's module"),
        sqlite3.DatabaseError("not a database"),
    ],
)
def test_other_errors_are_none(error: Exception) -> None:
    assert not is_outage(error)


class Disk:
    """An action that raises these errors, one per call, and then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    def __call__(self) -> str:
        if self._errors:
            raise self._errors.pop(0)
        return "written"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "RETRY_S", 0.01)


def test_an_action_is_repeated_until_the_outage_is_over(caplog: pytest.LogCaptureFixture) -> None:
    messages: list[str] = []
    disk_outage = Outage("the file", report=messages.append)
    with caplog.at_level(logging.WARNING):
        assert (
            retry_through_outage(Disk(FULL, FULL, sqlite_error(sqlite3.SQLITE_BUSY)), disk_outage, limit_s=math.inf)
            == "written"
        )
    assert disk_outage.problem == ""
    assert messages[:2] == ["the file: waits for the disk (No space left on device since 0 s)"] * 2
    begin, end = (record.message for record in caplog.records)
    assert begin == "the file waits for the disk: No space left on device"
    assert end.startswith("the file goes on after 0.") and end.endswith(": of a test")


def test_another_error_and_the_limit_end_the_wait() -> None:
    disk_outage = Outage("the file")
    with pytest.raises(ValueError, match="a value"):
        retry_through_outage(Disk(FULL, ValueError("a value")), disk_outage, limit_s=math.inf)
    with pytest.raises(OSError, match="No space left"):
        retry_through_outage(Disk(*[FULL] * 99), disk_outage, limit_s=0.05)
    assert disk_outage.problem.startswith("No space left on device since 0 s")


def test_a_wait_that_is_given_up_raises_the_newest_error() -> None:
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(OSError, match="No space left"):
        retry_through_outage(Disk(FULL), Outage("the file"), limit_s=math.inf, given_up=given_up)
