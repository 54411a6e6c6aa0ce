"""Keeps what was told of a run: one message for a cause, again after a while, and one when it is over.

The messages are lines of ``alarms.jsonl`` in the run's folder, from which the next controller and the page read them.
`advanced` says whether a rule of ``notify.rules`` is true, and `clean` takes secrets out of a text.
"""

from __future__ import annotations

import math
import operator
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec

from relax_core.config.notify_rules import Rule
from relax_core.config.redaction import REDACTED, USER_INFO
from relax_core.contracts.foreign_files import decode_json, open_plain, shown
from relax_core.observe.event_log import AppendFile

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
        self._opened: AppendFile | None = None
        self._told: dict[tuple[str, str], Alarm] = {}  # the newest message of each cause that is not over
        self._left_out: dict[tuple[str, str], int] = {}
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
            self._opened = self._opened or AppendFile(self._file, lines=True)
            self._opened.append(msgspec.json.encode(alarm) + b"\n")
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


_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, kw_only=True)
class RuleState:
    """Is what a rule has seen.

    ``held`` is how many measured values in a row were beyond the bound, ``value`` the newest one, of train step
    ``step``. With `Rule.of_best`, ``recent`` holds the newest values, and ``best`` is the largest mean of as many.
    """

    held: int = 0
    value: float = math.nan
    step: int = -1
    recent: tuple[float, ...] = ()
    best: float | None = None

    def is_true(self, rule: Rule) -> bool:
        """Returns whether the rule is true by now."""
        return self.held >= rule.steps


def advanced(rule: Rule, state: RuleState, value: float | None, *, step: int) -> RuleState:
    """Returns the state after a record of train step ``step``; ``value`` is None where it did not have the number.

    What was not measured says nothing: the state stays, and so it does for NaN, unless the rule asks for it. A step
    that is done again, because a resume undid it, begins the count anew.
    """
    if step <= state.step:
        state = RuleState(best=state.best)
    if value is None or (math.isnan(value) and rule.sign != "nan"):
        return state
    state = replace(state, value=value, step=step)
    if not rule.of_best:
        beyond = math.isnan(value) if rule.sign == "nan" else _COMPARE[rule.sign](value, rule.bound)
        return replace(state, held=state.held + 1 if beyond else 0)
    recent = (*state.recent, value)[-rule.steps :]
    if len(recent) < rule.steps:
        return replace(state, recent=recent, held=0)
    mean = fmean(recent)
    best = mean if state.best is None else max(state.best, mean)
    beyond = best > 0.0 and _COMPARE[rule.sign](mean, rule.bound * best)
    return replace(state, recent=recent, best=best, held=rule.steps if beyond else 0)


MOST_CHARACTERS = 500
_SECRET_NAME = re.compile(r"token|secret|password|passwd|api_?key|credential|auth", re.IGNORECASE)
_SECRETS = (
    USER_INFO,
    re.compile(r"(?i)(?<=bearer )\S+"),
    re.compile(r"(?i)(?<=token=)[^\s&;,]+"),
    re.compile(r"(?i)(?:(?<=password=)|(?<=password: )|(?<=api_key=)|(?<=api-key: )|(?<=secret=))[^\s&;,]+"),
    re.compile(r"\b(?:rlx|sk|hf|ghp|xox[abp])[-_][A-Za-z0-9_-]{8,}"),
)
_ERROR_NAME = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Warning|Timeout|Lost)\b(?=:)")
_SHORTEST = 6  # characters of a variable's value that may be a secret


def clean(text: str, *, environment: Mapping[str, str] = os.environ) -> str:
    """Returns a cause as it may be sent: without secrets, and up to the name of the first exception.

    What follows the name of an exception may quote a prompt or a response. Values of environment variables whose names
    say that they are secret are taken out wherever they stand.
    """
    error = _ERROR_NAME.search(text)
    if error is not None:
        text = f"{text[: error.end()]} (the run's logs say more)"
    for name, value in environment.items():
        if len(value) >= _SHORTEST and _SECRET_NAME.search(name):
            text = text.replace(value, REDACTED)
    for secret in _SECRETS:
        text = secret.sub(REDACTED, text)
    return shown(text)[:MOST_CHARACTERS]
