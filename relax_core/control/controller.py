"""The controller watches one attempt of the run's services until it ends.

No train step waits for it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from relax_core.contracts.bus import CALL_TIMEOUT_S, BusLost, BusProgress, BusTimeout
from relax_core.control.controller_process import SupervisorPipe
from relax_core.control.recoveries import Recoveries, RunFailed, ServicesLost, run_failed
from relax_core.observe.stall_asks import StallAsks
from relax_core.roles.role_context import RunContext, worker_name

if TYPE_CHECKING:  # these modules import Ray, which reads the path of its token when it is imported
    from relax_core.control.autoscaler import Autoscaler
    from relax_core.control.engine_changes import EngineChanges
    from relax_core.control.engine_orders import EngineOrders
    from relax_core.control.process_numbers import EngineNumbers, ProcessNumbers
    from relax_core.control.run_view import RunView
    from relax_core.control.serve_deployments import ServeDeployments
    from relax_core.control.services import Services
    from relax_core.control.stall_report import Watchdog
    from relax_core.control.worker_health import BusWatch, HealthManager

TICK_S = 0.25  # the longest delay after which the end, a failure or a signal is noticed
STATUS_S = 1.0
FIRST_STEP_S = 1.0  # how long a stop waits for the train step that may just be done
TRAINER = worker_name("actor", 0)


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """Says how the services ended without a failure.

    ``stopped`` is True if the run was asked to end before its last step. ``progress`` is the last answer of the bus.
    """

    stopped: bool
    progress: BusProgress


class Controller:
    """Watches the services, ends them in order, and shows their progress.

    It reports to the ``supervisor`` when a train step is done, and learns there that the user or the machine has asked
    the run to end early.
    """

    def __init__(
        self,
        context: RunContext,
        services: Services,
        *,
        bus: BusWatch,
        serve_deployments: ServeDeployments,
        recoveries: Recoveries,
        view: RunView,
        health: HealthManager,
        watchdog: Watchdog,
        engines: EngineChanges,
        engine_numbers: EngineNumbers,
        process_numbers: ProcessNumbers,
        orders: EngineOrders | None = None,
        autoscaler: Autoscaler | None = None,
        supervisor: SupervisorPipe,
    ) -> None:
        self._context = context
        self._services = services
        self._bus = bus
        self._serve_deployments = serve_deployments
        self._recoveries = recoveries
        self._view = view
        self._health = health
        self._watchdog = watchdog
        self._engines = engines
        self._engine_numbers = engine_numbers
        self._process_numbers = process_numbers
        self._orders = orders
        self._autoscaler = autoscaler
        self._supervisor = supervisor
        self._stall_asks = StallAsks(context.run_dir)
        self._step = context.start_step
        self._progress = 0
        self._moved = time.monotonic()

    def run(self) -> RunEnd:
        """Returns when the trainer is done.

        Raises `ServicesLost` if the services have to start again, and `RunFailed` with the first cause of a failure
        that a new start would not repair.
        """
        settings = self._context.config.run
        stopping_since: float | None = None
        checked = 0.0
        self._supervisor.watch_steps()
        while True:
            if self._supervisor.stop_requested() and stopping_since is None:
                stopping_since = time.monotonic()
                self._stop()
            due = time.monotonic() - checked >= STATUS_S or self._step >= settings.steps or self._bus.lost is not None
            if due:
                checked = time.monotonic()
                self._check()
                if self._health.done(TRAINER):
                    break
            self._tick_engines(stopping=stopping_since is not None)
            self._show("stopping: a checkpoint is written" if stopping_since is not None else "")
            if stopping_since is not None and time.monotonic() - stopping_since > settings.stop_timeout_s:
                raise RunFailed(f"the trainer did not stop within run.stop_timeout_s={settings.stop_timeout_s:.0f} s")
            self._check_stall()
            time.sleep(TICK_S)
        self._show("")
        finished = self._last_progress().version >= settings.steps
        if finished and self._context.config.eval.every:
            self._await_last_evaluation()
        self._show("")
        # Without a stop request the trainer ended by itself: all steps are done, or run.patience is exhausted.
        stopped = not finished and self._supervisor.stop_requested()
        return RunEnd(stopped=stopped, progress=self._last_progress())

    def _tick_engines(self, *, stopping: bool) -> None:
        """Moves the engines that come and go on, and the orders for them."""
        self._engines.tick(self._health.beats, ended=self._health.ended)
        self._engine_numbers.tick(self._health.beats, step=self._step)
        self._process_numbers.tick(self._health.beats, step=self._step)
        if self._orders is not None:
            trained = self._step > self._context.start_step
            self._orders.tick(self._health.beats, step=self._step, trained=trained, stopping=stopping)
        if self._autoscaler is not None:
            self._autoscaler.tick(self._view.records, self._health.beats, stopping=stopping)

    def _stop(self) -> None:
        """Asks the services to stop, or reports that no train step is done, so that the supervisor kills them.

        The trainer reports the metrics of a step just before the bus has the step, so the bus gets a second for it.
        """
        has_own_ray = self._context.config.launcher.ray_address is None
        if has_own_ray and not self._supervisor.trained and not self._supervisor.ordered:
            start = self._context.start_step
            try:
                progress = asyncio.run(self._services.bus.wait_progress(start, timeout_s=FIRST_STEP_S))
            except (BusLost, BusTimeout) as error:
                raise ServicesLost("the bus did not answer while the run was being stopped", log=str(error)) from error
            if progress.version == start:
                self._supervisor.report_untrained()
                return
            self._supervisor.report_trained()
        self._services.request_stop()

    def _last_progress(self) -> BusProgress:
        try:
            return asyncio.run(self._services.bus.progress(timeout_s=CALL_TIMEOUT_S))
        except BusLost as error:
            raise ServicesLost("the bus died", log=str(error)) from error

    def _await_last_evaluation(self) -> None:
        """Waits for the last evaluation, or returns at once if a stop was requested.

        Raises `RunFailed` if the evaluation does not end within run.stall_timeout_s.
        """
        limit = self._context.config.run.stall_timeout_s
        deadline = time.monotonic() + limit
        while not (self._supervisor.stop_requested() or self._services.wait_evaluated(STATUS_S)):
            if time.monotonic() > deadline:
                raise RunFailed(f"the last evaluation did not come within run.stall_timeout_s={limit:.0f} s")
            self._check()
            self._show("the last evaluation is under way")
            time.sleep(TICK_S)

    def _check(self) -> None:
        """Polls the workers and Serve.

        Raises `RunFailed` if Serve did not start. A run is not stalled while the trainer makes progress in a long
        operation, such as a checkpoint.
        """
        self._stall_asks.check(partial(self._watchdog.report, dict(self._health.beats), step=self._step))
        self._health.check(bus_lost=self._bus.lost, step=self._step)
        self._services.record_statuses({name: beat.status for name, beat in self._health.beats.items() if beat.status})
        progress = self._health.progress(TRAINER)
        if progress != self._progress:
            self._progress, self._moved = progress, time.monotonic()
            self._watchdog.moved()
        self._serve_deployments.check(step=self._step)
        if (error := self._serve_deployments.error()) is not None:
            raise run_failed("Ray Serve did not start the roles' Serve deployments", error)

    def _show(self, message: str) -> None:
        progress = self._bus.progress
        if progress is not None and progress.version != self._step:
            self._step, self._moved = progress.version, time.monotonic()
            self._watchdog.moved()
            self._supervisor.report_trained()
            self._recoveries.step_done()
            self._serve_deployments.follow(self._context.namespace)
        self._view.show(step=self._step, progress=progress, roles=self._health.roles, message=message)

    def _check_stall(self) -> None:
        settings = self._context.config.run
        idle_s = time.monotonic() - self._moved
        self._watchdog.check(self._health.beats, step=self._step)
        first = self._step == self._context.start_step
        limit = settings.start_timeout_s + settings.stall_timeout_s if first else settings.stall_timeout_s
        if idle_s > limit:
            states = "; ".join(
                f"{role.name} {role.state} {role.since_s:.0f} s {role.detail}" for role in self._health.roles
            )
            raise ServicesLost(f"no train step ended for {limit:.0f} s at step {self._step}: {states}")
