"""When no train step ends for long: who waits for whom, printed as one chain, down to who waits for nobody."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
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
BUS_S = 2.0  # a bus that answers does so in milliseconds


class Watchdog:
    """Reports after ``run.watch_after_s`` seconds without a train step, then again after as many more. A report is made
    in a thread of its own, since it asks processes that may not answer."""

    def __init__(self, context: RunContext, services: Services) -> None:
        self._context = context
        self._services = services
        self._since = self._told = time.monotonic()

    def moved(self) -> None:
        """A train step ended, or a checkpoint that it waits for was written further."""
        self._since = self._told = time.monotonic()

    def check(self, beats: Mapping[str, Beat], *, step: int) -> None:
        """Reports if it is time."""
        now = time.monotonic()
        if now - self._told >= self._context.config.run.watch_after_s:
            self._told = now
            arguments = (dict(beats), step, now - self._since)
            threading.Thread(target=self._report, args=arguments, name="watchdog", daemon=True).start()

    def _report(self, beats: Mapping[str, Beat], step: int, still_s: float) -> None:
        waits: list[BusWait] | str
        try:
            waits = self._services.bus.waits(timeout_s=BUS_S)
        except (BusLost, BusTimeout) as error:
            waits = str(error)
        found = chain(beats, waits, start=worker_name("actor", 0))
        handles: Mapping[str, Any] = self._services.handles()
        now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        lines = [
            f"{now} no train step ended for {still_s:.0f} s at step {step}; who waits for whom:",
            *(f"  {line}" for line in found.lines),
            f"  blocker: {', '.join(found.blockers)}",
        ]
        for name in found.blockers:
            if name == BUS:
                stacks = stacks_from_outside(self._services.bus_pid)
            else:
                stacks = stacks_of(beats.get(name), handles.get(name))
            lines += [f"  {name}: {stacks[0]}", *(f"    {line}" for line in stacks[1:])]
        text = "\n".join(lines) + "\n"
        print(text, file=sys.stderr, end="", flush=True)
        log = self._context.log_dir / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(text)
