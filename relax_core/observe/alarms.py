"""Records the alarms of a run and sends them as messages. An alarm reports that a problem began, recurred or ended.

Alarms are written to the event log. A restarted controller and the dashboard read them there. `advanced` updates the
state of a rule of ``notify.rules``, and `clean` removes secrets from a text. `AlarmSender` sends messages to the
receivers of ``notify.urls_file``, with one thread per receiver.

Run as a program, this file sends one message. The program is used when the controller of a run is dead. It prints a
line for each receiver that did not accept the message, and then exits with code 1:

    python -m relax_core.observe.alarms URLS_FILE TITLE TEXT
"""

from __future__ import annotations

import logging
import math
import operator
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from relax_core.config.notify_rules import Rule
from relax_core.config.redaction import REDACTED, USER_INFO
from relax_core.contracts.untrusted_files import shown
from relax_core.observe.event_log import ALARMS, Alarm, EventFile, EventReader

NOTICES = ("started", "finished", "stopped")  # informational events, not alarms
MAX_CAUSES = 10_000  # remembered causes; the oldest are dropped first


class AlarmLog:
    """Decides whether an alarm is due, and appends each alarm to the event log.

    A cause is a text that names a problem. A cause that recurs within ``repeat_s`` seconds is counted but not reported.
    ``problem`` is the error of the last write to the log, or "". Only one thread may use this class.
    """

    def __init__(self, run_dir: Path, *, repeat_s: float, clock: Callable[[], float] = time.time) -> None:
        self._file = EventFile(run_dir, ALARMS)
        self._repeat_s, self._clock = repeat_s, clock
        self.problem = ""
        self._told: dict[tuple[str, str], Alarm] = {}  # newest alarm of each cause that has not ended
        self._left_out: dict[tuple[str, str], int] = {}
        for alarm in read_alarms(run_dir):
            self._remember(alarm)

    def report(self, event: str, cause: str, *, title: str, text: Callable[[], str]) -> Alarm | None:
        """Returns the new alarm, or None if the cause was reported within ``repeat_s``.

        Calls ``text`` only for a new alarm.
        """
        key, now = (event, cause), self._clock()
        before = self._told.get(key)
        if before is not None and now - before.time_s < self._repeat_s:
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return None
        kind: Literal["new", "again"] = "new" if before is None else "again"
        left_out = self._left_out.pop(key, 0)
        more = f"\nIt occurred {left_out} more times since the last message." if left_out else ""
        whole = text() + more
        return self._write(
            Alarm(time_s=now, event=event, cause=cause, kind=kind, title=title, text=whole, left_out=left_out)
        )

    def over(self, event: str, cause: str, *, title: str, text: Callable[[], str]) -> Alarm | None:
        """Returns an alarm of kind "over", or None if the cause has no open alarm."""
        if (event, cause) not in self._told:
            return None
        now = self._clock()
        return self._write(Alarm(time_s=now, event=event, cause=cause, kind="over", title=title, text=text()))

    def _write(self, alarm: Alarm) -> Alarm:
        self._remember(alarm)
        try:
            self._file.append(alarm)
            self.problem = ""
        except OSError as error:  # the alarm may be about a full disk
            self.problem = f"the event log lacks alarms: {error}"
        return alarm

    def _remember(self, alarm: Alarm) -> None:
        key = (alarm.event, alarm.cause)
        self._told.pop(key, None)
        if alarm.kind != "over":
            self._told[key] = alarm
        while len(self._told) > MAX_CAUSES:
            del self._told[next(iter(self._told))]


def read_alarms(run_dir: Path) -> list[Alarm]:
    """Returns the alarms of a run, oldest first. Skips unreadable lines."""
    events = EventReader(run_dir, kinds=("alarm",), writer=ALARMS).each()
    return [event for event in events if isinstance(event, Alarm)]


_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, kw_only=True)
class RuleState:
    """Stores the state of an alarm rule between train steps.

    ``held``: number of consecutive values that met the rule's condition. ``value``: the newest value, from train step
    ``step``. ``recent`` and ``best`` are used with `Rule.of_best`: the last ``rule.steps`` values, and the largest mean
    so far of ``rule.steps`` consecutive values.
    """

    held: int = 0
    value: float = math.nan
    step: int = -1
    recent: tuple[float, ...] = ()
    best: float | None = None

    def is_true(self, rule: Rule) -> bool:
        """Returns whether the condition has held for ``rule.steps`` values."""
        return self.held >= rule.steps


def advanced(rule: Rule, state: RuleState, value: float | None, *, step: int) -> RuleState:
    """Returns the state after a record of train step ``step``. ``value`` is None if the record lacks the metric.

    A missing value leaves the state unchanged. NaN also leaves it unchanged, except for a rule that tests for NaN. A
    step that is repeated after a resume restarts the count.
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


MAX_CHARACTERS = 500
_SECRET_NAME = re.compile(r"token|secret|password|passwd|api_?key|credential|auth(?!or)", re.IGNORECASE)
_SECRETS = (
    USER_INFO,
    re.compile(r"(?i)(?<=bearer )\S+"),
    re.compile(r"(?i)(?<=token=)[^\s&;,]+"),
    re.compile(r"(?i)(?:(?<=password=)|(?<=password: )|(?<=api_key=)|(?<=api-key: )|(?<=secret=))[^\s&;,]+"),
    re.compile(r"\b(?:rlx|sk|hf|ghp|xox[abp])[-_][A-Za-z0-9_-]{8,}"),
)
_ERROR_NAME = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Warning|Timeout|Lost)\b(?=:)")
_SHORTEST = 6  # shorter values (in characters) of environment variables are not treated as secrets


def clean(text: str, *, environment: Mapping[str, str] = os.environ) -> str:
    """Removes secrets from a cause, cuts it after the name of the first exception, and returns the result.

    The text after an exception's name may quote a prompt or a response. Values of environment variables with names such
    as ``API_KEY`` are removed everywhere.
    """
    error = _ERROR_NAME.search(text)
    if error is not None:
        text = f"{text[: error.end()]} (the run's logs say more)"
    for name, value in environment.items():
        if len(value) >= _SHORTEST and _SECRET_NAME.search(name):
            text = text.replace(value, REDACTED)
    for secret in _SECRETS:
        text = secret.sub(REDACTED, text)
    return shown(text)[:MAX_CHARACTERS]


# -- Receivers ---------------------------------------------------------------------------------------------------------
TRY_S = 10.0  # time limit of one attempt to send a message
PAUSES_S = (1.0, 3.0)  # pauses before the second and the third attempt
MAX_WAITING = 100  # queued messages per receiver; newer messages are dropped and counted
MAX_SINGLE = 3  # if more messages wait, they are combined into one message
MAX_TEXT = 8_000  # characters of a message

Notify = Callable[[str, str], bool]  # sends a title and a text, and returns whether the receiver accepted them


class AlarmSender:
    """Sends messages to named receivers, with three attempts per receiver.

    Calls ``report``, from any thread, with a line about undelivered messages. All methods are thread-safe.
    """

    def __init__(
        self,
        receivers: Sequence[tuple[str, Notify]],
        report: Callable[[str], None],
        *,
        try_s: float = TRY_S,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        self._threads = [
            _ReceiverThread(name, notify, report, try_s=try_s, pauses_s=pauses_s) for name, notify in receivers
        ]

    def put(self, title: str, text: str) -> None:
        """Queues a message for each receiver and returns at once."""
        for thread in self._threads:
            thread.put(title, text)

    def close(self, *, timeout_s: float) -> None:
        """Waits at most ``timeout_s`` seconds for the queued messages. Reports and drops the remaining messages."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.begin_close()
        for thread in self._threads:
            thread.end(deadline=deadline)


class _ReceiverThread:
    def __init__(
        self, name: str, notify: Notify, report: Callable[[str], None], *, try_s: float, pauses_s: Sequence[float]
    ) -> None:
        self._name, self._notify, self._report = name, notify, report
        self._try_s, self._pauses_s = try_s, pauses_s
        self._wake = threading.Condition()
        self._waiting: list[tuple[str, str]] = []  # title and text of each message
        self._under_way = ""  # title of the message that is being sent
        self._dropped = 0
        self._closing = False
        self._thread = threading.Thread(target=self._main, name=f"notify {name}", daemon=True)
        self._thread.start()

    def put(self, title: str, text: str) -> None:
        with self._wake:
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append((title, text))
                self._wake.notify_all()
            else:
                self._dropped += 1

    def begin_close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def end(self, *, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._wake:
            lost = [self._under_way, *(title for title, _ in self._waiting)] if self._thread.is_alive() else []
        if lost:
            self._report(f"notify: {self._name} did not get these messages: {', '.join(map(repr, lost))}")

    def _main(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closing)
                taken, self._waiting = self._waiting, []
                dropped, self._dropped = self._dropped, 0
                self._under_way = taken[0][0] if taken else ""
            if not taken:
                return
            for title, text in joined(taken, dropped=dropped):
                self._send(title, text)

    def _send(self, title: str, text: str) -> None:
        why = ""
        for pause_s in (0.0, *self._pauses_s):
            time.sleep(pause_s)
            why = self._try(title, text)
            if not why:
                return
        self._report(f"notify: {self._name} did not accept {title!r} in {1 + len(self._pauses_s)} tries: {why}")

    def _try(self, title: str, text: str) -> str:
        """Tries once. Returns why the receiver did not accept the message, or "".

        If the receiver hangs, the thread stays.
        """
        ends: list[str] = []

        def send() -> None:
            try:
                ends.append("" if self._notify(title, text) else "the receiver refused the message or did not answer")
            except Exception as error:  # any error of Apprise; its text may contain secrets
                ends.append(type(error).__name__)

        thread = threading.Thread(target=send, name=f"notify {self._name}, one try", daemon=True)
        thread.start()
        thread.join(self._try_s)
        return ends[0] if ends else f"no answer within {self._try_s:g} s"


def joined(waiting: Sequence[tuple[str, str]], *, dropped: int) -> list[tuple[str, str]]:
    """Returns title and text of each message. Joins them into one message if many wait or if ``dropped`` is not 0."""
    messages = [(title, text[:MAX_TEXT]) for title, text in waiting]
    if len(messages) <= MAX_SINGLE and not dropped:
        return messages
    parts = [f"{title}\n{text}" for title, text in messages]
    if dropped:
        parts.insert(0, f"{dropped} further messages did not fit into the queue.")
    return [(f"{messages[0][0]}, and {len(messages) + dropped - 1} more", "\n\n".join(parts)[:MAX_TEXT])]


KEY = "notify.urls_file"
INSTALL = "pip install 'relax-core[notify]'"


def read_receivers(path: Path) -> list[tuple[str, Notify]]:
    """Returns the name and the send function of each receiver. Skips empty lines and lines that begin with #.

    The name consists of scheme and host, and is safe to log.

    Raises ValueError with the key, the line number and the fix. The error never shows the address, because an address
    may contain a password. The import of Apprise takes half a second.
    """
    if find_spec("apprise") is None:
        raise ValueError(f"{KEY}={path} needs the package apprise: {INSTALL}")
    path = path.expanduser()
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{KEY}={path} cannot be read: {error}. Name a text file with one address per line."
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"{KEY}={path} has the mode {stat.S_IMODE(mode):o}, but addresses hold passwords: chmod 600 it."
        )
    import apprise

    logging.getLogger("apprise").addHandler(logging.NullHandler())  # Apprise logs addresses
    logging.getLogger("apprise").propagate = False
    memory = apprise.PersistentStoreMode.MEMORY  # Apprise then writes no files
    asset = apprise.AppriseAsset(app_id="Relax", app_desc="Relax", storage_mode=memory, secure_logging=True)
    found: list[tuple[str, Notify]] = []
    for number, line in enumerate(lines, 1):
        address = line.strip()
        if not address or address.startswith("#"):
            continue
        server = apprise.Apprise.instantiate(address, asset=asset)
        if server is None:
            scheme = address.partition("://")[0]
            message = f"scheme {scheme[:20]!r}" if "://" in address and scheme.isalnum() else "line"
            raise ValueError(
                f"{KEY}={path}, line {number}: Apprise knows no such address (its {message}). Its schemes are listed "
                "at "
                "https://appriseit.com, such as json://HOST, mailtos://USER:PASSWORD@HOST and slack://…"
            )
        host = getattr(server, "host", None) or ""
        found.append((f"{address.partition('://')[0]} {host}".strip(), partial(_notify, server)))
    if not found:
        raise ValueError(f"{KEY}={path} has no address. Write one per line, such as json://HOST/PATH.")
    return found


def _notify(server: Any, title: str, text: str) -> bool:
    return bool(server.notify(title=title, body=text))


END_S = 40.0  # enough for three attempts


def send_message(receivers: Sequence[tuple[str, Notify]], *, title: str, text: str) -> list[str]:
    """Sends a message to all receivers. Returns a line for each receiver that did not accept the message."""
    lines: list[str] = []
    sender = AlarmSender(receivers, lines.append)
    sender.put(title, text)
    sender.close(timeout_s=END_S)
    return lines


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    urls_file, title, text = words
    lines = send_message(read_receivers(Path(urls_file)), title=title, text=text)
    print("\n".join(lines), end="\n" if lines else "", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
