"""The controller: watches the services, shows the panel, ends the run. It stands beside the step path."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_core.contracts.bus import BusLost, BusProgress, BusTimeout
from relax_core.control.watch import RoleWatch, RunFailed, run_failed
from relax_core.observe.metrics_actor import MetricsUnavailable
from relax_core.observe.panel import Panel, PanelState
from relax_core.observe.records import MetricRecord
from relax_core.observe.states import RoleState
from relax_core.roles.context import RunContext, worker_name
from relax_core.roles.worker import WorkerStatus

if TYPE_CHECKING:
    from relax_core.control.services import Services  # imports Ray, which must first be told its token

TICK_S = 0.25  # how late the end, a failure or a signal is noticed
STATUS_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """``stopped``: the run was asked to end before its last step."""

    stopped: bool


class Controller:
    """One run. ``stop_requested`` says whether the user or the machine asked for an early end."""

    def __init__(
        self, context: RunContext, services: Services, *, panel: Panel, stop_requested: Callable[[], bool]
    ) -> None:
        self._context = context
        self._services = services
        self._panel = panel
        self._stop_requested = stop_requested
        self._watch = RoleWatch()
        self._roles: list[RoleState] = []
        self._cursor = 0
        self._step = context.start_step
        self._moved = time.monotonic()
        self.progress: BusProgress | None = None  # the newest that was seen

    def run(self) -> RunEnd:
        """Returns when the trainer is done; raises `RunFailed` with the first cause, or past a deadline."""
        settings = self._context.config.run
        stopping_since: float | None = None
        looked = 0.0
        while True:
            if self._stop_requested() and stopping_since is None:
                stopping_since = time.monotonic()
                self._services.request_stop()
            if time.monotonic() - looked >= STATUS_S or self._step >= settings.steps:
                looked = time.monotonic()
                if self._look():
                    break
            self._show("stopping: a checkpoint is written" if stopping_since is not None else "")
            if stopping_since is not None and time.monotonic() - stopping_since > settings.stop_timeout_s:
                raise RunFailed(f"the trainer did not stop within run.stop_timeout_s={settings.stop_timeout_s:.0f} s")
            self._check_stall()
            time.sleep(TICK_S)
        self._show("")
        finished = self._step >= settings.steps
        if finished and self._context.config.eval.every:
            self._await_last_evaluation()
        self._show("")
        return RunEnd(stopped=not finished)

    def _await_last_evaluation(self) -> None:
        """Returns when it is in, or at once where a stop was asked for; raises `RunFailed` where it does not come."""
        limit = self._context.config.run.stall_timeout_s
        deadline = time.monotonic() + limit
        while not (self._stop_requested() or self._services.wait_evaluated(STATUS_S)):
            if time.monotonic() > deadline:
                raise RunFailed(f"the last evaluation did not come within run.stall_timeout_s={limit:.0f} s")
            self._look()
            self._show("the last evaluation is under way")
            time.sleep(TICK_S)

    def _look(self) -> bool:
        """Takes the workers' statuses; True once the trainer is done. Serve's failure to start ends the run too."""
        statuses = self._services.statuses()
        self._roles = self._watch.roles(statuses)
        if self._services.fronts.done() and (error := self._services.fronts.exception()) is not None:
            raise run_failed("Ray Serve did not start the roles' fronts", error)
        actor = statuses[worker_name("actor", 0)]
        return isinstance(actor, WorkerStatus) and actor.state == "done"

    def _show(self, message: str) -> None:
        records: list[MetricRecord] = []
        try:
            self._cursor, records = self._services.metrics.poll(self._cursor)
        except MetricsUnavailable as error:
            message = message or str(error)
        try:
            progress = self._services.bus.progress(timeout_s=self._context.config.bus.call_timeout_s)
        except (BusLost, BusTimeout) as error:
            raise RunFailed(str(error)) from error
        self.progress = progress
        if progress.version != self._step:
            self._step, self._moved = progress.version, time.monotonic()
        self._panel.update(
            PanelState(step=self._step, records=records, progress=progress, roles=self._roles, message=message)
        )

    def _check_stall(self) -> None:
        settings = self._context.config.run
        first = self._step == self._context.start_step
        limit = settings.start_timeout_s + settings.stall_timeout_s if first else settings.stall_timeout_s
        if time.monotonic() - self._moved > limit:
            owed = "; ".join(f"{role.name} {role.state} {role.since_s:.0f} s {role.detail}" for role in self._roles)
            raise RunFailed(f"no train step ended for {limit:.0f} s at step {self._step}: {owed}")
