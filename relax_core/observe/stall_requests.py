"""Requests a stall report from a run's controller, by files in the run's folder.

`relax stall` or the gateway writes the request ``RUN/stall/ID.ask``. The controller checks the folder once a second and
writes the report ``RUN/stall/ID.txt``. No gateway is needed, only a folder that both processes can access. Every user
with write access to the folder may request a report.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

FOLDER = "stall"
ASK, ANSWER = ".ask", ".txt"
FORGOTTEN_S = 120.0  # older requests are removed without a report
POLL_S = 0.1
TIMEOUT_S = 60.0  # default wait for a report
_ID = re.compile(r"[0-9a-f]{32}")
log = logging.getLogger(__name__)


class NoAnswer(Exception):
    """The controller did not write a report in time, or the run has ended."""


class StallRequests:
    """Answers the requests in a run's folder. It works in a thread of the controller's process."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._thread: threading.Thread | None = None

    def check(self, report: Callable[[], str]) -> None:
        """Starts a thread that answers all open requests with the result of one ``report()`` call. Returns at once."""
        if self._thread is not None and self._thread.is_alive():
            return
        asks = self._open_asks()
        if asks:
            self._thread = threading.Thread(target=self._answer, args=(asks, report), name="stall-report", daemon=True)
            self._thread.start()

    def _open_asks(self) -> list[str]:
        try:
            entries = [entry for entry in os.scandir(self._folder) if entry.name.endswith(ASK) and entry.is_file()]
        except OSError:  # there is no request
            return []
        return [name for entry in entries if _ID.fullmatch(name := entry.name.removesuffix(ASK))]

    def _answer(self, asks: list[str], report: Callable[[], str]) -> None:
        try:
            recent = [ask for ask in asks if self._age_s(ask) < FORGOTTEN_S]
            text = report() if recent else ""
            recent = [ask for ask in recent if (self._folder / f"{ask}{ASK}").exists()]  # not withdrawn requests
            for ask in asks:
                (self._folder / f"{ask}{ASK}").unlink(missing_ok=True)
            for ask in recent:
                made = self._folder / f"{ask}.partial"
                made.write_text(text, encoding="utf-8")
                made.replace(self._folder / f"{ask}{ANSWER}")
        except OSError as error:  # the disk is full
            log.warning("a report for relax stall could not be written: %s", error)

    def _age_s(self, ask: str) -> float:
        try:
            return time.time() - (self._folder / f"{ask}{ASK}").stat().st_mtime
        except FileNotFoundError:  # the requester has removed the request
            return math.inf


class StallRequest:
    """Writes a request to the folder of a run. `close` removes the request. Raises OSError if writing fails."""

    def __init__(self, run_dir: Path) -> None:
        folder, name = run_dir / FOLDER, secrets.token_hex(16)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._ask, self._answer = folder / f"{name}{ASK}", folder / f"{name}{ANSWER}"
        self._ask.write_text("", encoding="utf-8")

    def report(self) -> str | None:
        """Returns the report, or None before the controller has written it."""
        return self._answer.read_text(encoding="utf-8") if self._answer.exists() else None

    def close(self) -> None:
        """Removes the request and the report."""
        self._ask.unlink(missing_ok=True)
        self._answer.unlink(missing_ok=True)


def request_report(run_dir: Path, *, timeout_s: float, goes_on: Callable[[], bool]) -> str:
    """Requests a stall report from the controller of the run in ``run_dir``, waits for it, and returns it.

    Raises `NoAnswer` after ``timeout_s`` seconds, or if ``goes_on`` returns False, which means that the run has ended.
    Raises OSError if the folder cannot be written.
    """
    deadline = time.monotonic() + timeout_s
    with closing(StallRequest(run_dir)) as ask:
        while (report := ask.report()) is None:
            if not goes_on():
                raise NoAnswer("the run has just ended")
            if time.monotonic() > deadline:
                raise NoAnswer(f"its controller did not answer within {timeout_s:g} s")
            time.sleep(POLL_S)
    return report
