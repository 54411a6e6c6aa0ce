"""Sends notifications about a run: about its start and end, failures, and the alert rules of ``notify.rules``."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from relax_core.config.notify_rules import PRESETS, Rule, read_rule, read_rules
from relax_core.config.schema import RelaxConfig
from relax_core.observe.alarms import (
    NOTICES,
    AlarmLog,
    AlarmSender,
    Notify,
    RuleState,
    advanced,
    clean,
    read_receivers,
)
from relax_core.observe.event_log import ACTOR, MetricRecord, is_resume
from relax_core.observe.stragglers import Straggler, straggler_text
from relax_core.observe.summary import FIRST_STEPS, HACK, SIGNAL_RULES, first_steps_line, signal_line
from relax_core.server.gateway_client import read_address

REPEAT_S = 3600.0  # minimum time in seconds between two notifications with the same cause
RESTARTS_PER_HOUR = 3  # a notification is sent if more restarts in place (tier 1) occur in an hour
DISK_GIB = 2.0  # a notification is sent if less space is free in the run's folder
END_S = 20.0  # seconds that the end of the run waits for its last messages
LOOK_S = 5.0
HOUR_S = 3600.0
UNKNOWN_RECORDS = 100  # a metric is reported if it is missing in this number of records of its source
GIB = 1 << 30
OF_PRESETS = frozenset(words for rules in PRESETS.values() for words in rules)  # metrics that some runs do not have
SEEN_ANYWAY = (*NOTICES, "failed")  # events that have other lines on the terminal
TITLES = {
    "started": "the run has started",
    "finished": "the run has finished",
    "stopped": "the run was stopped",
    "failed": "the run has failed",
    "restarts": "many restarts",
    "recovery": "all services start again from a checkpoint",
    "stalled": "no train step ends",
    "engine_lost": "{cause} is lost",
    "order_failed": "order {cause} has failed",
    "disk_low": "the disk is nearly full",
    "straggler": "{cause} is slow",
}


class RunAlarms:
    """Records the alarms of a run and sends them to the addresses in ``notify.urls_file``.

    Any thread may call `happened` and `over`; only one thread may call all further methods. ``again`` says that an
    earlier process has already reported the start.
    """

    def __init__(self, config: RelaxConfig, *, again: bool, clock: Callable[[], float] = time.time) -> None:
        notify, self._clock = config.notify, clock
        self._run_dir, self._name, self._steps = Path(config.run.dir), config.name, config.run.steps
        self._on = frozenset(notify.events)
        self._alarm_log = AlarmLog(self._run_dir, repeat_s=REPEAT_S, clock=clock)
        self._rules = {rule: RuleState() for rule in read_rules(notify.rules)}
        self._signal = {rule: RuleState() for rule in map(read_rule, SIGNAL_RULES)}
        self._signal_line = partial(signal_line, max_new_tokens=config.rollout.max_new_tokens)
        self._first: list[MetricRecord] | None = []  # records of the trainer's first steps; None after them
        self._first_line = partial(
            first_steps_line, temperature=config.rollout.temperature, group_size=config.algo.group_size
        )
        self._without: dict[Rule, int] = {}  # rule → number of records without the rule's metric
        self._seen: set[Rule] = set()  # rules with a recorded metric
        self._began_s = clock()
        self._events: deque[tuple[bool, str, str, str]] = deque()
        self._lines: deque[str] = deque()
        self._restarts: deque[float] = deque()
        self._failures: set[tuple[str, str]] = set()
        self._failed: dict[str, Callable[[], Mapping[str, str]]] = {}  # event → function for its failures
        self._step = 0
        self._sender = AlarmSender(self._receivers(notify.urls_file), self._lines.append)
        if not again:
            self.happened("started", "the run", f"{self._steps} train steps")

    def _receivers(self, urls_file: str | None) -> list[tuple[str, Notify]]:
        """Returns the receivers. An invalid file is logged and does not end the run."""
        try:
            return [] if urls_file is None else read_receivers(Path(urls_file))
        except ValueError as error:
            self._lines.append(f"notify: no notifications are sent: {error}")
            return []

    def watch(
        self, *, engine_lost: Callable[[], Mapping[str, str]], order_failed: Callable[[], Mapping[str, str]]
    ) -> None:
        """Sets the functions that map failed added engines and failed new orders to their causes."""
        self._failed = {"engine_lost": engine_lost, "order_failed": order_failed}

    # -- events -------------------------------------------------------------------------------------------------------
    def happened(self, event: str, cause: str, words: str) -> None:
        """Records an event with its cause and a text, and returns at once."""
        self._events.append((False, event, cause, words))

    def over(self, event: str, cause: str) -> None:
        """Records the end of an event, and returns at once."""
        self._events.append((True, event, cause, ""))

    def restarted(self, cause: str) -> None:
        """Records a restart in place (tier 1). Too many restarts within an hour are an event."""
        now = self._clock()
        self._restarts.append(now)
        while self._restarts[0] < now - HOUR_S:
            self._restarts.popleft()
        if cause.startswith("engine-"):
            self.happened("engine_lost", cause.partition(" ")[0], f"{cause}; it is started again in place")
        if len(self._restarts) > RESTARTS_PER_HOUR:
            self.happened(
                "restarts", "tier 1", f"{len(self._restarts)} restarts in place in an hour; the last: {cause}"
            )

    def stragglers(self, stragglers: Iterable[Straggler]) -> None:
        """Records new and recovered stragglers."""
        for straggler in stragglers:
            if straggler.ended:
                self.over("straggler", straggler.who)
            else:
                self.happened("straggler", straggler.who, straggler_text(straggler))

    def add_records(self, records: Iterable[MetricRecord]) -> None:
        """Applies all rules to the newest records, in order. Records of an earlier process are ignored.

        A line is logged if the run trains without a learning signal.
        """
        for record in records:
            if record.time_s < self._began_s:
                continue
            if is_resume(record):
                self._rules = {rule: RuleState(best=state.best) for rule, state in self._rules.items()}
                self._signal = dict.fromkeys(self._signal, RuleState())
                self._first = None
                continue
            if self._first is not None and record.source == ACTOR:
                self._look_at_first(self._first, record)
            for rule, state in self._rules.items():
                if rule.source == record.source:
                    self._advance(rule, state, record)
            for rule, state in self._signal.items():
                if rule.source == record.source:
                    after = advanced(rule, state, record.values.get(rule.name), step=record.step)
                    self._signal[rule] = after
                    if after.is_true(rule) and not state.is_true(rule):
                        self._lines.append(self._signal_line(rule, record))

    def _look_at_first(self, first: list[MetricRecord], record: MetricRecord) -> None:
        first.append(record)
        if len(first) == FIRST_STEPS:
            self._first = None
            if (line := self._first_line([metric_record.values for metric_record in first])) is not None:
                self._lines.append(line)

    def _advance(self, rule: Rule, state: RuleState, record: MetricRecord) -> None:
        value = record.values.get(rule.name)
        self._rules[rule] = after = advanced(rule, state, value, step=record.step)
        if after.is_true(rule):
            message = f"{rule.number} is {after.value:.6g} after train step {record.step}"
            self.happened("rule", rule.words, self._signal_line(rule, record) if rule.number == HACK else message)
        elif state.is_true(rule):
            self.over("rule", rule.words)
        if value is None and rule not in self._seen and rule.words not in OF_PRESETS:
            self._without[rule] = self._without.get(rule, 0) + 1
            if self._without[rule] == UNKNOWN_RECORDS:
                self._lines.append(
                    f"notify.rules: {rule.number} was in none of {UNKNOWN_RECORDS} records of {rule.source}, so "
                    f"{rule.words!r} has no effect. docs/metrics.md has the names."
                )
        elif value is not None:
            self._seen.add(rule)

    def stop_watching(self) -> None:
        """Checks the functions of `watch` for the last time."""
        self.look()
        self._failed = {}

    # -- notifications ------------------------------------------------------------------------------------------------
    def tick(self, *, step: int) -> None:
        """Sends the events since the last call. ``step`` is the number of train steps done."""
        self._step = step
        while self._events:
            is_over, event, cause, words = self._events.popleft()
            self._notify(event, cause, words, is_over=is_over)

    def take_lines(self) -> list[str]:
        """Returns lines for the run's log: sent notifications, and failures to send."""
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def close(self, word: Literal["finished", "stopped", "failed"], why: str) -> list[str]:
        """Sends the end of the run, and waits for the last messages. Returns the last lines for the log."""
        self.happened(word, "the run", why)
        self.tick(step=self._step)
        self._sender.close(timeout_s=END_S)
        return self.take_lines()

    def look(self) -> None:
        """Checks states without an event source: the free disk space, and failed engines and orders."""
        free_gib = shutil.disk_usage(self._run_dir).free / GIB
        if free_gib < DISK_GIB:
            self.happened("disk_low", "disk", f"{free_gib:.2f} GiB are free in the run's folder")
        elif free_gib > 1.1 * DISK_GIB:
            self.over("disk_low", "disk")
        for event, failed in self._failed.items():
            for name, why in failed().items():
                if (event, name) not in self._failures:
                    self._failures.add((event, name))
                    self.happened(event, name, f"{name}: {why}")

    def _notify(self, event: str, cause: str, words: str, *, is_over: bool) -> None:
        if event not in self._on:
            return
        what = cause if event == "rule" else TITLES[event].format(cause=cause)
        if is_over:
            alarm = self._alarm_log.over(event, cause, title=f"{self._name}: over: {what}", text=self._where)
        else:
            text = partial(self._with_where, words)
            alarm = self._alarm_log.report(event, cause, title=f"{self._name}: {what}", text=text)
        if alarm is None:
            return
        more = f"; {alarm.left_out} times more since the last message" if alarm.left_out else ""
        if self._alarm_log.problem:
            self._lines.append(self._alarm_log.problem)
        if event not in SEEN_ANYWAY:
            known = "" if is_over else f" ({alarm.text.splitlines()[0]})"
            self._lines.append(f"alarm: {alarm.title.partition(': ')[2]}{known}{more}")
        self._sender.put(alarm.title, alarm.text)

    def _with_where(self, words: str) -> str:
        return f"{clean(words)}\n{self._where()}"

    def _where(self) -> str:
        """Returns lines with the train step, the run's folder and the page."""
        page = _page(self._run_dir)
        where = f"train step {self._step} of {self._steps}\n{self._run_dir.resolve()}"
        return where if page is None else f"{where}\n{page}"


def _page(run_dir: Path) -> str | None:
    """Returns the address of the run's page without its token; None without a gateway."""
    try:
        return f"page: {read_address(run_dir).url}"
    except FileNotFoundError:
        return None
