"""Keeps what was told of a run: one message for a cause, again after a while, and one when it is over.

The messages are lines of ``alarms.jsonl`` in the run's folder, from which the next controller and the page read them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from relax_core.contracts.foreign_files import decode_json, open_plain

FILE = "alarms.jsonl"
NOTICES = ("started", "finished", "stopped")  # events that are information and no alarm
MOST_READ_BYTES = 1 << 20  # of the end of the file
MOST_CAUSES = 10_000  # that are remembered; the oldest are forgotten first


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """Is one message about a run.

    ``event`` is one of `notify_schema.EVENTS`. Two messages with the same event and ``cause`` are about one thing;
    ``kind`` says whether it is new, told again, or over. ``left_out`` is how often it came since the message before.
    """

    time_s: float
    event: str
    cause: str
    kind: Literal["new", "again", "over"]
    title: str
    text: str
    left_out: int = 0


_decoder = msgspec.json.Decoder(Alarm)


class AlarmBook:
    """Decides whether a cause is told, and appends what is told to the file.

    A cause that comes again within ``repeat_s`` seconds is counted and not told. ``problem`` says why the newest
    message is not in the file, "" if it is. One thread uses it.
    """

    def __init__(self, run_dir: Path, *, repeat_s: float, clock: Callable[[], float] = time.time) -> None:
        self._file = run_dir / FILE
        self._repeat_s, self._clock = repeat_s, clock
        self.problem = ""
        self._told: dict[tuple[str, str], Alarm] = {}  # the newest message of each cause that is not over
        self._left_out: dict[tuple[str, str], int] = {}
        _end_last_line(self._file)
        for alarm in read_alarms(self._file):
            self._remember(alarm)

    def tell(self, event: str, cause: str, *, title: str, text: Callable[[], str]) -> Alarm | None:
        """Returns the message, or None, without a call of ``text``, if this cause was told a short while ago."""
        key, now = (event, cause), self._clock()
        before = self._told.get(key)
        if before is not None and now - before.time_s < self._repeat_s:
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return None
        kind: Literal["new", "again"] = "new" if before is None else "again"
        left_out = self._left_out.pop(key, 0)
        more = f"\nIt came {left_out} more times since the last message." if left_out else ""
        whole = text() + more
        return self._write(
            Alarm(time_s=now, event=event, cause=cause, kind=kind, title=title, text=whole, left_out=left_out)
        )

    def over(self, event: str, cause: str, *, title: str, text: Callable[[], str]) -> Alarm | None:
        """Returns the message that a cause is over, or None if it was not told or is over already."""
        if (event, cause) not in self._told:
            return None
        now = self._clock()
        return self._write(Alarm(time_s=now, event=event, cause=cause, kind="over", title=title, text=text()))

    def _write(self, alarm: Alarm) -> Alarm:
        self._remember(alarm)
        try:
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode(alarm) + b"\n")
            self.problem = ""
        except OSError as error:  # a full disk is what some messages are about
            self.problem = f"{FILE} lacks messages: {error}"
        return alarm

    def _remember(self, alarm: Alarm) -> None:
        key = (alarm.event, alarm.cause)
        self._told.pop(key, None)
        if alarm.kind != "over":
            self._told[key] = alarm
        while len(self._told) > MOST_CAUSES:
            del self._told[next(iter(self._told))]


def _end_last_line(file: Path) -> None:
    """Ends a line that a killed process has not finished, so that the next one begins a line of its own."""
    if file.is_file() and file.stat().st_size:
        with file.open("rb+") as opened:
            opened.seek(-1, os.SEEK_END)
            if opened.read(1) != b"\n":
                opened.write(b"\n")


def read_alarms(file: Path, *, newest: int | None = None) -> list[Alarm]:
    """Returns the ``newest`` messages of a file, the oldest first; a line that cannot be read is left out."""
    try:
        with open_plain(file) as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - MOST_READ_BYTES))
            lines = opened.read().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines if newest is None else lines[-newest:]:
        try:
            found.append(decode_json(line, _decoder))
        except ValueError:
            continue
    return found
