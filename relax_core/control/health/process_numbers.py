"""Records what the processes of the run use: cores, memory and GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from relax_core.control.health.heartbeats import Beat
from relax_core.observe.process_usage import USAGE_S, UsageMeter, usage_numbers
from relax_core.roles.process.role_context import BUS

CONTROLLER = "controller"


class ProcessNumbers:
    """Records the numbers of the workers, the bus and this process every `USAGE_S` seconds.

    The trackers are children of this process.

    ``bus_pid`` is None if the bus may be on another host.
    ``record`` records numbers after so many train steps.
    """

    def __init__(
        self,
        *,
        bus_pid: int | None,
        record: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        self._record = record
        self._meters = {CONTROLLER: UsageMeter()} | ({} if bus_pid is None else {BUS: UsageMeter(bus_pid)})
        self._at = time.monotonic()

    def tick(self, beats: Mapping[str, Beat], *, step: int) -> None:
        """Records the numbers if it is time to."""
        now = time.monotonic()
        if now - self._at < USAGE_S:
            return
        self._at = now
        found = {name: beat.status.usage for name, beat in beats.items() if beat.life == "alive" and beat.status}
        found |= {name: meter.newest() for name, meter in self._meters.items()}
        numbers: dict[str, float] = {}
        for name, usage in found.items():
            if usage is not None:
                numbers |= usage_numbers(name, usage)
        if numbers:
            self._record(step, numbers)
