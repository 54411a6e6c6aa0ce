"""What the user sees of a run, over all incarnations of its services: the panel, and lines about what happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relax_core.contracts.bus import BusProgress
from relax_core.observe.metrics_actor import MetricsClient, MetricsUnavailable
from relax_core.observe.panel import Panel, PanelState
from relax_core.observe.records import MetricRecord
from relax_core.observe.states import RoleState

EVENTS_LOG = "recoveries.log"


class RunView:
    """Feeds the panel. ``step``: train steps done; ``progress``: the newest that any incarnation's bus told."""

    def __init__(self, panel: Panel, metrics: MetricsClient, *, log_dir: Path, step: int) -> None:
        self.step = step
        self.progress: BusProgress | None = None
        self._panel = panel
        self._metrics = metrics
        self._log = log_dir / EVENTS_LOG
        self._cursor = 0

    def tell(self, event: str) -> None:
        """A line about the run itself, to the screen and to ``logs/recoveries.log``."""
        self._panel.tell(event)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(event + "\n")

    def show(self, *, step: int, progress: BusProgress | None, roles: Sequence[RoleState], message: str) -> None:
        """Takes the newest state of the incarnation that runs now."""
        records: list[MetricRecord] = []
        try:
            self._cursor, records = self._metrics.poll(self._cursor)
        except MetricsUnavailable as error:
            message = message or str(error)
        self.step = step
        self.progress = progress or self.progress
        self._panel.update(PanelState(step=step, records=records, progress=progress, roles=roles, message=message))
