"""Reports a stall: which worker waits for which worker, down to the worker that blocks the others, and its stacks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from relax_core.contracts.bus import BusLost, BusTimeout, BusWait
from relax_core.control.health.heartbeats import Beat
from relax_core.control.health.stacks import stacks_from_outside, stacks_of
from relax_core.control.health.wait_graph import chain
from relax_core.roles.process.role_context import BUS, RunContext, worker_name

if TYPE_CHECKING:
    from relax_core.control.run.services import Services

LOG = "watchdog.log"
REPORTS = 5  # of a run without a train step, until all services start again
BUS_S = 2.0  # timeout of the bus's answer, which takes milliseconds


class Watchdog:
    """Reports after each fifth of ``run.stall_timeout_s`` without a train step.

    A report is made in a thread of its own, because it calls processes that may not answer. ``stalled`` is then called
    there with a few words, and ``goes_on`` when a train step ends after it.
    """

    def __init__(
        self,
        context: RunContext,
        services: Services,
        *,
        stalled: Callable[[str], None] = lambda words: None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> None:
        self._context = context
        self._services = services
        self._stalled, self._goes_on = stalled, goes_on
        self._told = False
        self._since = self._reported = time.monotonic()

    def moved(self) -> None:
        """Restarts the time, because a train step ended or the trainer's checkpoint has made progress."""
        self._since = self._reported = time.monotonic()
        if self._told:
            self._told = False
            self._goes_on()

    def check(self, beats: Mapping[str, Beat], *, step: int) -> None:
        """Starts a report if it is due. ``step`` is the number of train steps done."""
        now = time.monotonic()
        if now - self._reported >= self._context.config.run.stall_timeout_s / REPORTS:
            self._reported = now
            arguments = (dict(beats), step, now - self._since)
            threading.Thread(target=self._report, args=arguments, name="watchdog", daemon=True).start()

    def report(self, beats: Mapping[str, Beat], *, step: int) -> str:
        """Returns the report of now; it calls processes that may not answer, which takes seconds."""
        idle_s = time.monotonic() - self._since
        return self._text(beats, f"the newest progress is {idle_s:.1f} s old, at step {step}")

    def _report(self, beats: Mapping[str, Beat], step: int, idle_s: float) -> None:
        text = self._text(beats, f"no train step ended for {idle_s:.0f} s at step {step}")
        blockers = next((line.strip() for line in text.splitlines() if line.startswith("  blocker:")), "")
        self._told = True
        self._stalled(f"no train step ended for {idle_s:.0f} s; {blockers}")
        print(text, file=sys.stderr, end="", flush=True)
        log = self._context.log_dir / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(text)

    def _text(self, beats: Mapping[str, Beat], what: str) -> str:
        waits: list[BusWait] | str
        try:
            waits = self._services.bus.waits(timeout_s=BUS_S)
        except (BusLost, BusTimeout) as error:
            waits = str(error)
        found = chain(beats, waits, start=worker_name("actor", 0))
        handles: Mapping[str, Any] = self._services.handles()
        now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        lines = [
            f"{now} {what}; which worker waits for which:",
            *(f"  {line}" for line in found.lines),
            f"  blocker: {', '.join(found.blockers)}",
        ]
        for name in found.blockers:
            if name == BUS:
                stacks = stacks_from_outside(self._services.bus_pid)
            else:
                stacks = stacks_of(beats.get(name), handles.get(name))
            lines += [f"  {name}: {stacks[0]}", *(f"    {line}" for line in stacks[1:])]
        return "\n".join(lines) + "\n"
