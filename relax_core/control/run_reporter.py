"""Shows a run on the terminal, over all attempts of its services: the live panel, and lines about events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from relax_core.contracts.bus import BusProgress
from relax_core.contracts.outage import is_outage
from relax_core.control.run_alarms import RunAlarms
from relax_core.observe.event_log import (
    ACTOR,
    LEDGER,
    SKELETONS,
    EventReader,
    EventWriter,
    GapRecord,
    MetricRecord,
    TextRecord,
    each_metric,
    read_texts,
)
from relax_core.observe.panel import Panel, PanelState, RoleState
from relax_core.observe.stragglers import (
    STRAGGLER,
    StragglerWatch,
    reported_stragglers,
    straggler_brief,
    straggler_numbers,
    straggler_row,
    straggler_text,
)
from relax_core.observe.trackers.tracker_process import Trackers
from relax_core.roles.process_placement import equal_trainers
from relax_core.roles.role_context import RunContext

EVENTS_LOG = "recoveries.log"
READ_S = 0.5  # maximum time in seconds that one call reads the event log, because the controller has other work
TRACKERS_S = 5.0  # interval in seconds between two checks of the trackers


class RunReporter:
    """Feeds the panel, and reports events on the terminal and in the log.

    ``step`` is the number of finished train steps. ``records`` are the metrics of the newest `read`. ``progress`` is
    the newest progress that a bus of any attempt returned. ``gaps`` counts records that were lost before they reached a
    file. ``stragglers`` detects workers and engines that are slower than their peers. ``alarms`` sends notifications,
    and returns lines if the run trains without a learning signal.
    """

    def __init__(
        self,
        panel: Panel,
        events: EventWriter,
        *,
        run_dir: Path,
        trackers: Trackers,
        step: int,
        stragglers: StragglerWatch | None = None,
        alarms: RunAlarms | None = None,
    ) -> None:
        self.step = step
        self.progress: BusProgress | None = None
        self.records: list[MetricRecord] = []
        self._panel = panel
        self.gaps = 0
        self._began_s = time.time()
        self._events, self._trackers = events, trackers
        self._reader = EventReader(run_dir)
        self._log = run_dir / "logs" / EVENTS_LOG
        self._problem = ""  # why this process cannot write events
        self._unwritten: list[str] = []  # reported lines that are not yet in the log
        self._ledger_problem = ""
        self.stragglers = StragglerWatch([]) if stragglers is None else stragglers
        self._alarms = alarms
        self._reported_drops = -1  # the step of the last report

    def report(self, event: str) -> None:
        """Writes a line about the run to the terminal and to ``logs/recoveries.log``.

        During a disk outage the line is kept, and written to the log together with a later line.
        """
        self._panel.print_line(event)
        self._unwritten.append(event)
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8") as log:
                log.write("".join(f"{line}\n" for line in self._unwritten))
        except OSError as error:
            if not is_outage(error):
                raise
        else:
            self._unwritten.clear()

    def read(self, *, step: int, progress: BusProgress | None) -> None:
        """Reads the newest records of the event log, and sets the progress of the current attempt."""
        self.records = self._read()
        self._check_writing()
        self.step = step
        self.progress = progress or self.progress
        if progress is not None:
            self._report_drops(progress)
            self._report_ledger(progress.ledger_problem)

    def draw(self, *, progress: BusProgress | None, roles: Sequence[RoleState], message: str) -> None:
        """Shows the newest state of the current attempt on the panel."""
        self._panel.update(
            PanelState(
                step=self.step,
                records=self.records,
                progress=progress,
                roles=roles,
                message=message,
                records_dropped={"events": self.gaps} if self.gaps else {},
                stragglers=[straggler_brief(straggler) for straggler in self.stragglers.present()],
            )
        )

    def reported_stragglers(self) -> list[dict[str, Any]]:
        """Returns the stragglers of the run for summary.json."""
        return [msgspec.to_builtins(straggler) for straggler in self.stragglers.all_of_run()]

    def report_stragglers(self) -> None:
        """Reports new and recovered stragglers, on the terminal and in the metrics."""
        self.stragglers.add_records(self.records)
        straggling = self.stragglers.take()
        if self._alarms is not None:
            self._alarms.stragglers(straggling)
        for straggler in straggling:
            self.report(straggler_text(straggler))
            self._events.record(STRAGGLER, self.step, straggler_numbers(straggler))
            self._events.record_texts(STRAGGLER, self.step, [straggler_row(straggler)])

    def send_alarms(self) -> None:
        """Applies the rules of `notify` to the newest records, and sends and logs the new events."""
        if self._alarms is not None:
            self._alarms.add_records(self.records)
            self._alarms.tick(step=self.step)
            for line in self._alarms.take_lines():
                self.report(line)

    def _read(self) -> list[MetricRecord]:
        """Returns the new metrics of the event log.

        After a restart of this process, reading all takes several calls.
        """
        found: list[MetricRecord] = []
        until = time.monotonic() + READ_S
        while events := self._reader.read():
            found += [event for event in events if isinstance(event, MetricRecord)]
            for event in events:
                if isinstance(event, TextRecord) and event.kind == SKELETONS and event.time_s >= self._began_s:
                    self._report_look(event)
            self.gaps += sum(event.records for event in events if isinstance(event, GapRecord))
            if time.monotonic() > until:
                break
        return found

    def _report_look(self, look: TextRecord) -> None:
        """Reports the notice that an evaluation may have about answers that look like an exploit of the reward."""
        if notice := str(look.rows[0].get("notice") or "") if look.rows else "":
            self.report(f"evaluation of weights {look.step}: {notice}")

    def _check_writing(self) -> None:
        """Reports why events cannot be written."""
        if self._events.problem and not self._problem:
            self.report(self._events.problem)
        self._problem = self._events.problem

    def _report_ledger(self, problem: str) -> None:
        """Reports that the ledger waits for the disk, and later that it is written again."""
        if problem and not self._ledger_problem:
            self.report(f"the ledger waits for the disk: {problem}")
        elif self._ledger_problem and not problem:
            self.report(f"the ledger is written again; it had waited for the disk: {self._ledger_problem}")
        self._ledger_problem = problem

    def check_trackers(self) -> None:
        """Reports trackers that have started to fail."""
        for problem in self._trackers.check():
            self.report(problem)

    def _report_drops(self, progress: BusProgress) -> None:
        """Records the ledger's drop counts by reason once per train step, after the first dropped sample.

        In a run with media, it also records counts by modality once per train step.
        """
        ledger = progress.ledger
        if (ledger.dropped or ledger.modalities) and progress.version != self._reported_drops:
            self._reported_drops = progress.version
            counts: dict[str, float] = {f"dropped/{reason}": count for reason, count in ledger.dropped.items()}
            for name, modality in ledger.modalities.items():
                counts |= {f"modality/{name}/issued": modality.issued, f"modality/{name}/trained": modality.trained}
                counts |= {f"modality/{name}/dropped/{reason}": count for reason, count in modality.dropped.items()}
            self._events.record(LEDGER, progress.version, counts)


@dataclass(frozen=True, kw_only=True)
class EarlierRecords:
    """Holds the metric ``sources`` and the number of train ``steps`` of earlier commands in the run's folder."""

    sources: frozenset[str]
    steps: int

    @classmethod
    def of(cls, run_dir: Path) -> EarlierRecords:
        """Reads each record once and does not keep records, because records of 20,000 train steps take 170 MB."""
        sources, steps = set(), 0
        for record in each_metric(run_dir):
            sources.add(record.source)
            if record.source == ACTOR:
                steps = max(steps, record.step + 1)
        return cls(sources=frozenset(sources), steps=steps)


def open_reporter(
    context: RunContext,
    panel: Panel,
    events: EventWriter,
    trackers: Trackers,
    earlier: EarlierRecords,
    alarms: RunAlarms,
) -> RunReporter:
    """Returns the reporter of a run, with the stragglers that earlier processes reported."""
    config = context.config
    straggling = reported_stragglers(read_texts(context.run_dir, STRAGGLER)) if STRAGGLER in earlier.sources else []
    return RunReporter(
        panel,
        events,
        run_dir=context.run_dir,
        trackers=trackers,
        step=context.start_step,
        stragglers=StragglerWatch(equal_trainers(config), earlier=straggling),
        alarms=alarms,
    )
