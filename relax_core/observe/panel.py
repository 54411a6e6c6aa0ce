"""Shows a run in progress: as a live panel on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from relax_core.contracts.bus import BusProgress
from relax_core.observe.event_log import ACTOR, MetricRecord
from relax_core.observe.panel_view import PanelView, RoleState, RunningNumbers, ShownConsole, line, picture, role_line

REFRESH_S = 0.5
LINE_STEPS = 10
LINE_S = 5.0
STALL_S = 30.0
STARTING = "starting"


@dataclass(frozen=True, kw_only=True)
class PanelState:
    """Holds the state of a run.

    ``step`` is the number of train steps done. ``records`` are the newest ones, in order; they may repeat records of an
    earlier state. ``message`` is a line for the user. ``records_dropped`` maps each metrics sink to the number of
    records that it lacks. ``stragglers`` say in a few words who is slower than its equals.
    """

    step: int
    records: Sequence[MetricRecord] = ()
    progress: BusProgress | None = None
    roles: Sequence[RoleState] = ()
    message: str = ""
    records_dropped: Mapping[str, int] = field(default_factory=dict)
    stragglers: Sequence[str] = ()


class Panel:
    """Shows the states that `update` receives while it is used as a context manager, from one thread.

    The live panel is drawn at most twice a second. With ``live=False`` (run.panel=false) there are plain lines even on
    a terminal: every ``LINE_STEPS`` steps or ``LINE_S`` seconds, when a role changes its state, and every ``STALL_S``
    seconds without a train step, with what each role waits for.
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
        # rich treats FORCE_COLOR as a terminal, but a log in CI is not one
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
        """Shows the last state. A panel that was entered twice closes with the inner block."""
        if not self._is_open:
            return
        self._is_open = False
        if self._live is None:
            if self._recorded_step() > self._line_step:
                self._print_figures()
            return
        self._live.update(picture(self._view()))
        self._live.stop()

    def starting(self, roles: Sequence[str], *, first: str) -> None:
        """Shows that ``first`` is starting and that the ``roles`` start after it, before any role has a state."""
        if self._live is None:
            self._printed_roles = dict.fromkeys(roles, STARTING)
            self._print(f"starting {first}, then {', '.join(roles)}")
            return
        waiting = [RoleState(name=name, state="starting", since_s=0.0) for name in roles]
        self._state = PanelState(step=self._state.step, roles=waiting, message=f"starting {first}")
        self._live.update(picture(self._view()), refresh=True)

    def update(self, state: PanelState) -> None:
        """Takes the newest state, and shows it if that is due."""
        self._state = state
        self._numbers.merge(state.records)
        now = time.monotonic()
        if self._live is None:
            self._print_changes(now)
        elif now - self._drawn >= REFRESH_S:
            self._drawn = now
            self._live.update(picture(self._view()), refresh=True)

    def print_line(self, text: str) -> None:
        """Prints a line that stays on the screen, above the live panel if there is one."""
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
            self._print_figures()
        elif steps == 0 and now - self._line_time >= STALL_S:
            self._line_time = now
            roles = " · ".join(role_line(role) for role in state.roles)
            self._print(f"step {state.step}/{self._total_steps}, still  {roles}")

    def _recorded_step(self) -> int:
        """Returns the number of train steps up to the newest record, whose figures a line shows.

        It differs from the state's step for a moment, because records and state take different ways.
        """
        newest = self._numbers.latest_step(ACTOR)
        return self._state.step if newest is None else newest + 1

    def _print_figures(self) -> None:
        self._line_step = self._recorded_step()
        self._line_time = time.monotonic()
        self._print(line(dataclasses.replace(self._view(), step=self._line_step)))

    def _print(self, text: str) -> None:
        """Prints one line without wrapping it, because logs are searched by line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _state_text(role: RoleState) -> str:
    """Returns what a plain line says after the role's name.

    It merges states that change many times a second: running and waiting, and the details of a start. The line about a
    stalled run shows them.
    """
    if role.state in ("running", "waiting"):
        return "at work"
    return STARTING if role.state == "starting" else role_line(role).removeprefix(f"{role.name} ")
