"""Shows the metrics of a run in progress: as a live panel on a terminal, as plain lines in a file or pipe."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import IO, Literal, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel as Frame
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from relax_core.contracts.bus import BusProgress
from relax_core.contracts.untrusted_files import shown
from relax_core.observe.event_log import ACTOR, EVAL, ROLLOUT, MetricRecord, is_resume
from relax_core.observe.summary import AGENT, ENDED, panel_lines

REFRESH_S = 0.5
LINE_STEPS = 10
LINE_S = 5.0
STALL_S = 30.0
STARTING = "starting"


@dataclass(frozen=True, kw_only=True)
class PanelState:
    """Holds the state of a run that the panel shows.

    ``step`` is the number of finished train steps. ``records`` are the newest records, in order. They may repeat
    records of an earlier state. ``message`` is a line for the user. ``records_dropped`` maps the name of a metrics sink
    to the number of records that did not reach the sink. ``stragglers`` are short descriptions of the processes that
    are slower than their peers.
    """

    step: int
    records: Sequence[MetricRecord] = ()
    progress: BusProgress | None = None
    roles: Sequence[RoleState] = ()
    message: str = ""
    records_dropped: Mapping[str, int] = field(default_factory=dict)
    stragglers: Sequence[str] = ()


class Panel:
    """Shows the states that `update` receives. It is a context manager, for use in one thread.

    The live panel is drawn at most twice a second. With ``live=False`` (run.panel=false), plain lines are printed even
    on a terminal: every ``LINE_STEPS`` steps or ``LINE_S`` seconds, and when a role changes its state. If no train step
    ends for ``STALL_S`` seconds, a line shows the state of each role.
    """

    def __init__(
        self, total_steps: int, run_dir: Path, title: str, *, live: bool = True, console: Console | None = None
    ) -> None:
        self._total_steps = total_steps
        self._run_dir = run_dir
        self._title = title
        self._console = console or ShownConsole()
        self._numbers = RunningNumbers()
        self._state = PanelState(step=0)
        self._opened = time.monotonic()
        self._is_open = False
        self._drawn = 0.0
        self._live: Live | None = None
        # with FORCE_COLOR rich assumes a terminal, but a log in CI is not a terminal
        if live and self._console.is_interactive and self._console.file.isatty():
            self._live = Live(console=self._console, auto_refresh=False)
        self._line_step = 0
        self._line_time = self._opened
        self._printed_roles: dict[str, str] = {}
        self._printed_message = ""

    def __enter__(self) -> Self:
        if self._is_open:
            return self
        self._is_open = True
        if self._live is None:
            self._print(f"Relax · {self._title} · {self._total_steps} steps · {self._run_dir}")
        else:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shows the last state and closes the panel. If two ``with`` blocks are nested, the inner block closes it."""
        if not self._is_open:
            return
        self._is_open = False
        if self._live is None:
            if self._recorded_step() > self._line_step:
                self._print_metrics()
            return
        self._live.update(picture(self._view()))
        self._live.stop()

    def starting(self, roles: Sequence[str], *, first: str) -> None:
        """Shows that ``first`` is starting and that the ``roles`` will start next. Used before any role has a state."""
        if self._live is None:
            self._printed_roles = dict.fromkeys(roles, STARTING)
            self._print(f"starting {first}, then {', '.join(roles)}")
            return
        waiting = [RoleState(name=name, state="starting", since_s=0.0) for name in roles]
        self._state = PanelState(step=self._state.step, roles=waiting, message=f"starting {first}")
        self._live.update(picture(self._view()), refresh=True)

    def update(self, state: PanelState) -> None:
        """Stores the newest state. Redraws the panel or prints lines if that is due."""
        self._state = state
        self._numbers.merge(state.records)
        now = time.monotonic()
        if self._live is None:
            self._print_changes(now)
        elif now - self._drawn >= REFRESH_S:
            self._drawn = now
            self._live.update(picture(self._view()), refresh=True)

    def print_line(self, text: str) -> None:
        """Prints a line that stays on the screen, above a live panel."""
        self._print(text)

    def _view(self) -> PanelView:
        return PanelView(
            title=self._title,
            run_dir=self._run_dir,
            step=self._state.step,
            total_steps=self._total_steps,
            elapsed_s=time.monotonic() - self._opened,
            numbers=self._numbers,
            progress=self._state.progress,
            roles=self._state.roles,
            message=self._state.message,
            records_dropped=self._state.records_dropped,
            stragglers=self._state.stragglers,
        )

    def _print_changes(self, now: float) -> None:
        state = self._state
        changed: dict[str, list[str]] = {}
        for role in state.roles:
            text = _state_text(role)
            if self._printed_roles.get(role.name) != text:
                self._printed_roles[role.name] = text
                changed.setdefault(text, []).append(role.name)
        for text, names in changed.items():
            self._print(f"{', '.join(names)} {text}")
        if state.message and state.message != self._printed_message:
            self._print(state.message)
        self._printed_message = state.message
        step = self._recorded_step()
        self._line_step = min(self._line_step, step)  # a recovery returns to an earlier step
        steps = step - self._line_step
        if steps >= LINE_STEPS or (steps > 0 and now - self._line_time >= LINE_S):
            self._print_metrics()
        elif steps == 0 and now - self._line_time >= STALL_S:
            self._line_time = now
            roles = " · ".join(role_line(role) for role in state.roles)
            self._print(f"step {state.step}/{self._total_steps}, still  {roles}")

    def _recorded_step(self) -> int:
        """Returns the number of train steps up to the newest record.

        Lines show the metrics of the newest record. The number can briefly differ from the state's ``step``, because
        records and states arrive on different channels.
        """
        newest = self._numbers.latest_step(ACTOR)
        return self._state.step if newest is None else newest + 1

    def _print_metrics(self) -> None:
        self._line_step = self._recorded_step()
        self._line_time = time.monotonic()
        self._print(line(dataclasses.replace(self._view(), step=self._line_step)))

    def _print(self, text: str) -> None:
        """Prints one line without wrapping, because users search logs by line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _state_text(role: RoleState) -> str:
    """Returns a role's state for a plain line, without the role's name.

    States that alternate many times a second get the same text: "running" and "waiting", and the details of a start.
    Only the line about a stalled run shows them separately.
    """
    if role.state in ("running", "waiting"):
        return "at work"
    return STARTING if role.state == "starting" else role_line(role).removeprefix(f"{role.name} ")


# -- Drawing -----------------------------------------------------------------------------------------------------------
BLOCKS = "▁▂▃▄▅▆▇█"
UNKNOWN = "–"


def sparkline(values: Sequence[float], *, width: int, low: float | None = None, high: float | None = None) -> str:
    """Draws ``values`` as at most ``width`` blocks. Each block shows the mean of an equal share of the values.

    ``low`` and ``high`` are the ends of the scale, by default the smallest and the largest mean.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [index * len(finite) // count for index in range(count + 1)]
    means = [fmean(finite[start:end]) for start, end in pairwise(edges)]
    low = min(means) if low is None else low
    high = max(means) if high is None else high
    return "".join(block(mean, low=low, high=high) for mean in means)


def block(value: float, *, low: float, high: float) -> str:
    """Returns one block. Its height shows the position of ``value`` between ``low`` and ``high``."""
    if high <= low:
        return BLOCKS[0]
    height = int((value - low) / (high - low) * len(BLOCKS))
    return BLOCKS[min(max(height, 0), len(BLOCKS) - 1)]


def staleness_shares(histogram: Mapping[int, int]) -> list[tuple[int, float]]:
    """Returns (staleness, share of the samples) for every staleness from 0 to the largest, in order."""
    total = sum(histogram.values())
    if not total:
        return []
    last = max(staleness for staleness, count in histogram.items() if count)
    return [(staleness, histogram.get(staleness, 0) / total) for staleness in range(last + 1)]


def number(value: float | None, spec: str) -> str:
    """Formats ``value`` by ``spec``, or returns a dash if it is None."""
    return UNKNOWN if value is None else format(value, spec)


def duration(seconds: float | None) -> str:
    """Formats seconds as "12 s", "3:05 min" or "2:07 h"."""
    if seconds is None:
        return UNKNOWN
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


class ShownConsole(Console):
    """Prints untrusted text with rich. Control codes in the text are escaped; codes from rich are not.

    All code of Relax uses this console, because `ShownStream` would escape the codes of any other console.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of a renderable."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(shown(text), style)

    @property
    def file(self) -> IO[str]:
        """Returns the unfiltered stream, because `render` has already escaped the text."""
        found = super().file
        return getattr(found, "unfiltered", found)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file


RoleStateName = Literal["starting", "ready", "running", "waiting", "restarting", "failed", "done"]


@dataclass(frozen=True, kw_only=True)
class RoleState:
    """Holds the state of one worker, as the panel shows it.

    ``since_s`` is the number of seconds in this state. ``restarts`` counts the restarts of its process. ``detail`` is
    the reason for waiting or for a failure.
    """

    name: str
    state: RoleStateName
    since_s: float
    restarts: int = 0
    detail: str = ""


KEPT_STEPS = 2_000
RATE_STEPS = 20  # the speed is a mean over this number of newest steps
CURVES = ("reward", "exact", "entropy")  # the only metrics kept of older steps; all of a step take 10 KB


class RunningNumbers:
    """Holds all metrics of the newest steps, and the metrics `CURVES` of older steps.

    Merging a record a second time has no effect.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[int, Mapping[str, float]]] = {ACTOR: {}, EVAL: {}, ROLLOUT: {}}

    def merge(self, records: Iterable[MetricRecord]) -> None:
        """Adds records, which must be in order. A resume record removes the later steps."""
        for record in records:
            if is_resume(record):
                for values in self._values.values():
                    for step in [step for step in values if step >= record.step]:
                        del values[step]
            elif record.source in self._values:
                values = self._values[record.source]
                values[record.step] = record.values
                for older in list(islice(reversed(values), RATE_STEPS, RATE_STEPS + 1)):
                    values[older] = {name: values[older][name] for name in CURVES if name in values[older]}
                if len(values) > KEPT_STEPS:
                    del values[next(iter(values))]

    def latest(self, name: str, *, source: str = ACTOR) -> float | None:
        """Returns the newest finite value, or None."""
        for values in reversed(self._values[source].values()):
            if name in values and math.isfinite(values[name]):
                return values[name]
        return None

    def of_newest_step(self, name: str, *, source: str = ACTOR) -> float | None:
        """Returns the value in the newest record, or None if that record lacks it."""
        newest = self.newest(source)
        return newest[name] if name in newest and math.isfinite(newest[name]) else None

    def newest(self, source: str) -> Mapping[str, float]:
        """Returns the values of the newest record; empty before the first record."""
        return next(reversed(self._values[source].values()), {})

    def latest_step(self, source: str) -> int | None:
        """Returns the step of the newest record, or None."""
        return next(reversed(self._values[source]), None)

    def curve(self, name: str, *, source: str = ACTOR) -> list[float]:
        """Returns the values of ``name``, one of `CURVES`, in order of steps. Leaves out steps without a value."""
        return [values[name] for values in self._values[source].values() if name in values]

    def per_second(self, name: str) -> float | None:
        """Returns the rate of ``name`` per second of wall time over the newest steps, or None."""
        timed = self._timed()
        milliseconds = sum(values["step_ms"] for values in timed)
        return 1e3 * sum(values.get(name, 0.0) for values in timed) / milliseconds if milliseconds else None

    def mean_step_ms(self) -> float | None:
        """Returns the mean wall time of the newest steps in milliseconds, or None."""
        timed = self._timed()
        return sum(values["step_ms"] for values in timed) / len(timed) if timed else None

    def _timed(self) -> list[Mapping[str, float]]:
        newest = list(self._values[ACTOR].values())[-RATE_STEPS:]
        return [values for values in newest if "step_ms" in values]


SPARK_WIDTH = 18
STALENESS_SHOWN = 8
MAX_LINES = 3  # limit of lines about episodes, rewards and judges; more would not fit into 24 lines with five roles
STATE_STYLES = {
    "starting": "cyan",
    "ready": "cyan",
    "running": "green",
    "waiting": "yellow",
    "restarting": "magenta",
    "failed": "bold red",
    "done": "dim",
}


Metrics = tuple[str, str, str, str, str]  # label, value and curve of one metric; label and value of a second metric


@dataclass(frozen=True, kw_only=True)
class PanelView:
    """Holds the content of the panel at one moment.

    ``elapsed_s`` counts the seconds since the panel opened.
    """

    title: str
    run_dir: Path
    step: int
    total_steps: int
    elapsed_s: float
    numbers: RunningNumbers
    progress: BusProgress | None
    roles: Sequence[RoleState]
    message: str
    records_dropped: Mapping[str, int] = field(default_factory=dict)
    stragglers: Sequence[str] = ()

    @property
    def eta_s(self) -> float | None:
        """Returns the seconds that the remaining steps take at the speed of the newest steps, or None."""
        step_ms = self.numbers.mean_step_ms()
        return None if step_ms is None else (self.total_steps - self.step) * step_ms / 1e3


def picture(view: PanelView) -> RenderableType:
    """Draws the live panel. With five roles it fits into 80 columns and 24 lines."""
    parts: list[RenderableType] = [_progress(view), _metrics(view), _roles(view.roles)]
    if not _more_lines(view.numbers) and not view.stragglers:  # these lines replace the blank lines
        parts = [parts[0], "", parts[1], "", parts[2]]
    if view.message:
        parts.append(Text(view.message, style="bold yellow", overflow="ellipsis", no_wrap=True))
    return Frame(
        Group(*parts),
        title=f"[bold]Relax[/] · {escape(view.title)}",
        subtitle=f"[dim]{escape(_short_path(view.run_dir))}[/]",
        title_align="left",
        subtitle_align="left",
        border_style="blue",
        padding=(0, 1),
    )


def line(view: PanelView) -> str:
    """Returns the metrics of the newest step as one plain line. Leaves out missing metrics."""
    numbers = view.numbers
    parts = [f"step {view.step}/{view.total_steps}"]
    for label, value, spec in (
        ("reward", numbers.of_newest_step("reward"), ".3f"),
        ("exact", numbers.of_newest_step("exact"), ".3f"),
        ("eval", numbers.latest("exact", source=EVAL), ".3f"),
        ("samples/s", numbers.per_second("samples"), ".0f"),
        ("tokens/s", numbers.per_second("tokens"), ".0f"),
        ("loss", numbers.of_newest_step("loss"), ".4g"),
        ("grad_norm", numbers.of_newest_step("grad_norm"), ".3g"),
        ("gap", numbers.of_newest_step("logprob_gap_max"), ".1e"),
        ("cut", numbers.of_newest_step("truncated") or None, ".0%"),
        ("equal groups", numbers.of_newest_step("groups_without_signal") or None, ".0%"),
        ("without reward", numbers.of_newest_step("reward_failed", source=ROLLOUT) or None, ".0%"),
        ("turns", numbers.latest("turns", source=ROLLOUT), ".1f"),
        ("cached", numbers.latest("cached_share", source=ROLLOUT) or None, ".0%"),
    ):
        if value is not None:
            parts.append(f"{label} {format(value, spec)}")
    shares = staleness_shares(view.progress.staleness_histogram) if view.progress else []
    if shares:
        parts.append("staleness " + ",".join(f"{staleness}:{share:.0%}" for staleness, share in shares))
    if view.records_dropped:
        parts.append("metrics lack " + _counts(view.records_dropped))
    if view.stragglers:
        parts.append("slow " + ", ".join(view.stragglers))
    if view.eta_s is not None:
        parts.append(f"eta {duration(view.eta_s)}")
    return "  ".join(parts)


def role_line(role: RoleState) -> str:
    """Returns a role's state as one plain line."""
    restarts = f" (restarted {role.restarts}x)" if role.restarts else ""
    detail = f": {role.detail}" if role.detail else ""
    return f"{role.name} {role.state}{restarts}{detail}"


def _progress(view: PanelView) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, justify="right")
    share = view.step / view.total_steps if view.total_steps else 1.0
    table.add_row(
        f"step [bold]{view.step}[/]/{view.total_steps}",
        ProgressBar(total=max(view.total_steps, 1), completed=view.step, complete_style="green"),
        f"{share:.0%} · {duration(view.elapsed_s)} · ETA [bold]{duration(view.eta_s)}[/]",
    )
    return table


def _metrics(view: PanelView) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, min_width=6)
    table.add_column(no_wrap=True, style="green", min_width=SPARK_WIDTH)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    for label, value, curve, other_label, other_value in (*_results(view.numbers), *_diagnostics(view.numbers)):
        table.add_row(label, Text(value, style="bold"), curve, other_label, Text(other_value))
    grid = Table.grid()
    grid.add_row(table)
    grid.add_row(_bus_metrics(view))
    return grid


def _results(numbers: RunningNumbers) -> list[Metrics]:
    """Returns the rows for rewards, accuracy and loss. Each row also shows a second metric of the step."""
    eval_step = numbers.latest_step(EVAL)
    return [
        (
            "reward",
            number(numbers.latest("reward"), ".3f"),
            sparkline(numbers.curve("reward"), width=SPARK_WIDTH),
            "samples/s",
            number(numbers.per_second("samples"), ",.0f"),
        ),
        (
            "exact",
            number(numbers.latest("exact"), ".3f"),
            sparkline(numbers.curve("exact"), width=SPARK_WIDTH, low=0.0, high=1.0),
            "tokens/s",
            number(numbers.per_second("tokens"), ",.0f"),
        ),
        (
            "eval exact" if eval_step is None else f"eval at {eval_step}",
            number(numbers.latest("exact", source=EVAL), ".3f"),
            sparkline(numbers.curve("exact", source=EVAL), width=SPARK_WIDTH, low=0.0, high=1.0),
            "step time",
            _milliseconds(numbers.mean_step_ms()),
        ),
        (
            "loss",
            number(numbers.latest("loss"), ".4f"),
            "",
            "grad norm",
            number(numbers.latest("grad_norm"), ".3g"),
        ),
    ]


def _diagnostics(numbers: RunningNumbers) -> list[Metrics]:
    """Returns the rows that show whether the run is healthy."""
    return [
        (
            "log-prob gap",
            number(numbers.of_newest_step("logprob_gap_max"), ".1e"),
            "rollout ↔ trainer",
            "learning rate",
            number(numbers.latest("learning_rate"), ".2g"),
        ),
        (
            "entropy",
            number(numbers.latest("entropy"), ".3f"),
            sparkline(numbers.curve("entropy"), width=SPARK_WIDTH),
            "answers cut",
            number(numbers.of_newest_step("truncated"), ".0%"),
        ),
        (
            "reward ±",
            number(numbers.latest("reward/std"), ".3f"),
            _range(numbers, "reward", ".3g"),
            "equal groups",
            number(numbers.of_newest_step("groups_without_signal"), ".0%"),
        ),
    ]


def _range(numbers: RunningNumbers, name: str, spec: str) -> str:
    """Returns the smallest and the largest value over the newest step's samples, or "" before the first step."""
    least, largest = numbers.of_newest_step(f"{name}/min"), numbers.of_newest_step(f"{name}/max")
    return "" if least is None or largest is None else f"{least:{spec}} to {largest:{spec}}"


def _bus_metrics(view: PanelView) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=len("log-prob gap"))
    table.add_column(no_wrap=True)
    if view.records_dropped:
        table.add_row("metrics", Text(f"records missing: {_counts(view.records_dropped)}", style="bold red"))
    if view.stragglers:
        table.add_row("slow", Text(" · ".join(view.stragglers), style="bold yellow", overflow="ellipsis"))
    for label, words in _more_lines(view.numbers):
        table.add_row(label, Text(words, overflow="ellipsis"))
    progress = view.progress
    if progress is None:
        table.add_row("staleness", "–")
        table.add_row("samples", "–")
        return table
    ledger = progress.ledger
    table.add_row("staleness", _staleness_bar(progress.staleness_histogram))
    dropped = sum(ledger.dropped.values())
    faults = f" · [bold red]lost {ledger.lost}[/]" if ledger.lost else ""
    faults += f" · [bold red]trained twice {ledger.trained_twice}[/]" if ledger.trained_twice else ""
    table.add_row(
        "samples",
        f"{ledger.trained:,} trained · {dropped:,} dropped{faults} · "
        f"groups {progress.in_flight} in flight, {progress.waiting} waiting",
    )
    if dropped:
        counts = Text(overflow="ellipsis")
        if failed := view.numbers.of_newest_step("reward_failed", source=ROLLOUT):
            counts.append(f"{failed:.0%} recently without a reward", style="bold red").append(" · ")
        table.add_row("dropped", counts.append(_counts(ledger.dropped)))
    return table


def _more_lines(numbers: RunningNumbers) -> list[tuple[str, str]]:
    """Returns at most `MAX_LINES` lines about multi-turn episodes, rewards and judges."""
    of_rewards = list(panel_lines(numbers.newest(ROLLOUT)))
    return [*_episodes(numbers)[: MAX_LINES - len(of_rewards)], *of_rewards]


def _episodes(numbers: RunningNumbers) -> list[tuple[str, str]]:
    """Returns the lines about the newest multi-turn episodes. Empty for a single-turn environment."""
    newest = numbers.newest(ROLLOUT)
    if "turns" not in newest:
        return []
    played = [
        f"{newest['turns']:.1f} turns, p99 {newest['turns/p99']:.0f}",
        f"{newest['cached_share']:.0%} of prompts cached",
        *([f"{newest['restarts']:.2g} new starts"] if newest["restarts"] else []),
    ]
    spent = [", ".join(f"{name} {newest[f'{name}_s']:.2g}" for name in ("engine", "queue", "env")) + " s"]
    if f"{AGENT}requests" in newest:
        played.append(f"{newest[f'{AGENT}segments']:.1f} segments")
        spent.append(f"{newest[f'{AGENT}requests']:.1f} requests")
    elif newest["tool_calls"] or newest["failed_calls"]:
        spent.append(f"{newest['tool_calls']:.1f} calls, {newest['failed_calls']:.1f} failed")
    shares = {name.removeprefix(ENDED): share for name, share in newest.items() if name.startswith(ENDED)}
    ends = [f"{share:.0%} {reason}" for reason, share in sorted(shares.items(), key=lambda entry: -entry[1])]
    return [("episodes", " · ".join(played)), ("of each", " · ".join(spent)), ("ended", " · ".join(ends))]


def _counts(counts: Mapping[str, int]) -> str:
    """Returns the counts with their names as text, the largest count first."""
    return " · ".join(f"{count:,} {name}" for name, count in sorted(counts.items(), key=lambda entry: -entry[1]))


def _staleness_bar(histogram: Mapping[int, int]) -> Text:
    shares = staleness_shares(histogram)
    if not shares:
        return Text("–")
    text = Text()
    for staleness, share in shares[:STALENESS_SHOWN]:
        text.append(f"{staleness} ", style="dim")
        text.append(block(share, low=0.0, high=1.0) if share else " ", style="green" if staleness == 0 else "yellow")
        text.append(f" {share:.0%}   ")
    if len(shares) > STALENESS_SHOWN:
        text.append(f"… max {shares[-1][0]}")
    return text


def _roles(roles: Sequence[RoleState]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", expand=True)
    table.add_column("role", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("for", no_wrap=True, justify="right")
    table.add_column("restarts", no_wrap=True, justify="right")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for role in roles:
        table.add_row(
            role.name,
            Text(role.state, style=STATE_STYLES[role.state]),
            duration(role.since_s),
            str(role.restarts or ""),
            Text(role.detail.splitlines()[0] if role.detail else "", style="dim"),
        )
    return table


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} ms" if value < 10_000 else f"{value / 1e3:.1f} s"


def _short_path(path: Path) -> str:
    """Returns the path relative to the working folder if it lies in it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
