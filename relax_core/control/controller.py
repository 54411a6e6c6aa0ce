"""Implements the controller's loop, which starts the services of a run, monitors them, and restarts lost services.

**Start** (`run_services`): each attempt has a separate Ray namespace and a separate folder of weights. So a remaining
process of an earlier attempt cannot find services of the new attempt, and the weight versions of two attempts do not
mix. `Services` starts the bus and the workers at the same time; they discover each other.

**Monitoring** (`Controller.run`): one loop runs the checks in the table `Controller.checks`
(`relax_core/contracts/monitor.py`). A dead or frozen worker restarts in place (tier 1, `worker_health.py`). If the
services are lost (`ServicesLost`), all of them are killed and restart from the newest checkpoint in the same Ray (tier
2). If this fails, they restart in a new Ray. No train step waits for this process.

**Shutdown**: the trainer ends after its last step, or after a checkpoint if a stop was requested. Then the last
evaluation ends. Then the bus closes, so no worker waits for the bus. Last, the workers end; an engine owner also ends
its engine.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ray.exceptions import RayError

from relax_core.bus.journal import LedgerUnwritable
from relax_core.bus.ray_bus import blocking
from relax_core.config.modality import media_kinds
from relax_core.contracts.bus import CALL_TIMEOUT_S, BusLost, BusProgress, BusTimeout
from relax_core.contracts.monitor import Check, Finding, Monitor
from relax_core.control.autoscaler import Autoscaler
from relax_core.control.controller_process import SupervisorPipe
from relax_core.control.engine_changes import DRAIN_TIMEOUT_S, EngineChanges, EngineProbe
from relax_core.control.engine_orders import EngineOrders
from relax_core.control.engine_set import EngineSet
from relax_core.control.host.run_paths import SHARED_MEMORY
from relax_core.control.process_metrics import RECORD_S, EngineMetrics, ProcessMetrics
from relax_core.control.recoveries import FROM_CHECKPOINT, Recoveries, RunFailed, ServicesLost, run_failed
from relax_core.control.resume import ResumePoint, find_resume_point
from relax_core.control.run_alarms import LOOK_S, RunAlarms
from relax_core.control.run_reporter import TRACKERS_S, RunReporter
from relax_core.control.services import Services
from relax_core.control.stall_report import Watchdog
from relax_core.control.worker_health import BusHealth, WorkerHealth
from relax_core.observe.event_log import PROCESS, EventWriter
from relax_core.observe.process_usage import USAGE_S
from relax_core.observe.stall_requests import StallRequests
from relax_core.roles.role_context import ENGINE, RunContext, worker_name
from relax_core.server.engine_order_store import EngineOrderStore

if TYPE_CHECKING:  # not imported at run time, because it imports Ray Serve
    from relax_core.control.serve_deployments import ServeDeployments

TICK_S = 0.25  # maximum delay in seconds until the end, a failure or a signal is noticed
STATUS_S = 1.0
FIRST_STEP_S = 1.0  # seconds that a stop waits for a first train step that is just finishing
TRAINER = worker_name("actor", 0)
MEDIA = "media"  # name of the folder of media items
STALL = ("stalled", "no train step")  # event and cause of the alarm
SHOWN = ("train steps and records", "stragglers", "alarms and learning signal", "panel")  # checks that update the view


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Holds the parts of a run that outlive the attempts of the run's services.

    ``events`` writes the controller's records. ``ray_lost`` ends this process; the supervisor then starts a new
    controller with a new Ray. ``order_store`` contains the orders for ``engines`` and the autoscaler's decisions; it is
    None without a gateway. ``alarms`` sends notifications. ``serve`` has the roles' Serve deployments, None without
    ``run.serve``. ``checks`` monitor processes that outlive the attempts.
    """

    events: EventWriter
    serve: ServeDeployments | None
    view: RunReporter
    recoveries: Recoveries
    supervisor: SupervisorPipe
    ray_lost: Callable[[str], NoReturn]
    engines: EngineSet
    order_store: EngineOrderStore | None
    alarms: RunAlarms
    checks: Sequence[Check] = ()


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """Holds the result of services that ended without a failure.

    ``stopped`` is True if the run was asked to end before its last step. ``progress`` is the last answer of the bus.
    """

    stopped: bool
    progress: BusProgress


# -- Attempts ---------------------------------------------------------------------------------------------------------
def run_services(context: RunContext, resume: ResumePoint | None, parts: RunParts) -> RunEnd:
    """Runs the services until the trainer is done. Restarts lost services from checkpoints.

    ``resume`` is the checkpoint that the run began from. Raises `RunFailed` with the first cause when the run can no
    longer recover. After a loss during a stop the services recover once, and the stop continues.
    """
    point = resume
    lost_in_stop = False
    for number in itertools.count():
        attempt = replace(
            attempt_context(context, number, point),
            attempt=parts.events.begin_attempt(point.step if point else 0),
        )
        try:
            return _run_attempt(attempt, point, parts, number=number)
        except ServicesLost as lost:
            if lost_in_stop:
                raise RunFailed(f"{lost}, while the run was being stopped", log=lost.log) from lost
            lost_in_stop = parts.supervisor.stop_requested()
            limit = context.config.run.max_recoveries
            if parts.recoveries.count(FROM_CHECKPOINT) >= limit:
                raise _exhausted(lost, parts.recoveries, limit=limit) from lost
            point = _newest(context, lost) or resume
            for line in point.left if point else ():
                parts.view.report(line)
            from_step = point.step if point else 0
            at_step = max(parts.view.step, from_step)  # the newest records may lack the last step before the loss
            parts.recoveries.begin(FROM_CHECKPOINT, str(lost), at_step=at_step, from_step=from_step)
            for folder in {attempt.weights_folder, attempt.shared_weights}:
                if folder.exists():
                    shutil.rmtree(folder)
    raise AssertionError("itertools.count does not end")


def attempt_context(context: RunContext, number: int, point: ResumePoint | None) -> RunContext:
    """Returns the context of attempt ``number`` of the services, counted from 0.

    Each attempt has a separate folder of weights, which contains its folder of media items. So processes of an earlier
    attempt cannot change the items. In an external Ray cluster the weights are on a shared disk, and the media items
    are in the shared memory of each node.
    """
    weights_folder = context.weights_folder / str(number)
    media_folder: Path | None = weights_folder / MEDIA
    if not media_kinds(context.config):
        media_folder = None
    elif context.config.launcher.ray_address is not None:
        media_folder = SHARED_MEMORY / f"{context.weights_folder.name}-{number}-{MEDIA}"
    return replace(
        context,
        namespace=f"{context.run_namespace}-{number}",
        weights_folder=weights_folder,
        media_folder=media_folder,
        resume_from=point.folder if point else None,
        start_step=point.step if point else 0,
        restarted=context.restarted or number > 0,
    )


def _newest(context: RunContext, lost: ServicesLost) -> ResumePoint | None:
    """Returns the run's newest checkpoint. Raises `RunFailed` if the checkpoint cannot be read."""
    try:
        return find_resume_point(replace(context.config, resume="auto"))
    except ValueError as error:
        raise RunFailed(f"{lost}; the run cannot continue from its checkpoint either: {error}", log=lost.log) from error


def _exhausted(lost: ServicesLost, recoveries: Recoveries, *, limit: int) -> RunFailed:
    """Returns the failure of a run that may not recover again. Its text has the first cause, then the last cause."""
    if recoveries.count(FROM_CHECKPOINT) == 0:
        return RunFailed(f"{lost} (run.max_recoveries={limit})", log=lost.log)
    text = f"{recoveries.first_cause(FROM_CHECKPOINT)}; recovered, then: {lost} (run.max_recoveries={limit})"
    return RunFailed(text, log=lost.log)


def _run_attempt(context: RunContext, point: ResumePoint | None, parts: RunParts, *, number: int) -> RunEnd:
    parts.engines.begin(context.weights_folder)
    try:
        services = Services(context, point.snapshot if point else None, engines=parts.engines)
    except (BusLost, TimeoutError, RayError) as error:
        lost = ServicesLost(f"the services did not start: {type(error).__name__}: {error}")
        if number > 0 and context.config.launcher.ray_address is None:  # a restart within this Ray was not enough
            parts.ray_lost(str(lost))
        raise lost from error
    if parts.recoveries.count(FROM_CHECKPOINT) == 0:  # after a recovery, Serve deployments wait for the next train step
        _deploy(context, parts)
    try:
        end = Controller(context, services, parts).run()
    except ServicesLost:
        services.kill()
        raise
    except KeyboardInterrupt:  # the user sent a second stop signal
        with suppress(LedgerUnwritable, BusTimeout):
            services.close_immediately(reason="the run was ended at once")
        raise
    except BaseException as error:
        failed = error.worker if isinstance(error, RunFailed) else None
        with suppress(LedgerUnwritable, BusTimeout):  # the first error is raised, and not an error that it caused
            services.close(reason="the run has ended", failed=failed)
        raise
    try:
        services.close(reason="the run has ended")
    except (LedgerUnwritable, BusTimeout) as error:
        raise run_failed("the ledger is not complete", error) from error
    return end


def _deploy(context: RunContext, parts: RunParts) -> None:
    if parts.serve is not None:
        parts.serve.follow(context.namespace)


# -- One attempt ------------------------------------------------------------------------------------------------------
class Controller:
    """Monitors one attempt of the services until the trainer is done.

    The controller reports finished train steps to the supervisor. The supervisor passes on the stop requests of the
    user or the machine.
    """

    def __init__(self, context: RunContext, services: Services, parts: RunParts) -> None:
        config = context.config
        heartbeat_timeout_s = config.run.heartbeat_timeout_s
        self._context, self._services, self._parts = context, services, parts
        self._step = context.start_step
        self._progress = 0  # the trainer's progress in a long operation
        self._stopping_since: float | None = None
        self._message = ""  # state of the run for the panel
        self._bus = BusHealth(services.bus, heartbeat_timeout_s=heartbeat_timeout_s)
        self._health = WorkerHealth(
            services,
            parts.recoveries,
            heartbeat_timeout_s=heartbeat_timeout_s,
            start_timeout_s=config.run.start_timeout_s,
        )
        self._watchdog = Watchdog(
            context,
            services,
            stalled=partial(parts.alarms.happened, *STALL),
            goes_on=partial(parts.alarms.over, *STALL),
        )
        self._stall_requests = StallRequests(context.run_dir)
        self._engines = EngineChanges(
            parts.engines,
            services,
            folder=context.weights_folder,
            join_timeout_s=config.engine.start_timeout_s,
            drain_timeout_s=DRAIN_TIMEOUT_S,
            probe=EngineProbe(context),
        )
        self._engine_numbers = EngineMetrics(
            parts.engines,
            record=partial(parts.events.record, ENGINE),
            add_decoding=parts.view.stragglers.add_decoding,
        )
        self._process_numbers = ProcessMetrics(
            bus_pid=services.bus_pid if config.launcher.ray_address is None else None,
            record=partial(parts.events.record, PROCESS),
        )
        self._orders: EngineOrders | None = None
        self._autoscaler: Autoscaler | None = None
        if parts.order_store is not None:
            self._orders = EngineOrders(
                parts.order_store,
                self._engines,
                parts.engines,
                kind=config.engine.name,
                steps=config.run.steps,
                stop=parts.supervisor.order_stop,
            )
            self._autoscaler = Autoscaler(config, parts.order_store)

    def checks(self) -> list[Check]:
        """Returns the checks of one attempt, in the order of execution."""
        view, serve = self._parts.view, self._parts.serve
        deployments = [Check(name="Serve", every_s=STATUS_S, look=serve.look, act=_run_failed)] if serve else []
        return [
            self._bus.check(),
            Check(name="stop", every_s=0.0, look=self._look_for_stop),
            Check(name="relax stall", every_s=STATUS_S, look=self._answer_stall_requests),
            Check(name="workers", every_s=STATUS_S, look=self._look_at_workers),
            *deployments,
            *self._parts.checks,
            Check(name="engines that come and go", every_s=0.0, look=self._move_engines),
            Check(name="orders", every_s=0.0, look=self._move_orders),
            Check(name="numbers of engines", every_s=RECORD_S, look=self._record_engines),
            Check(name="numbers of processes", every_s=USAGE_S, look=self._record_processes),
            Check(name="trackers", every_s=TRACKERS_S, look=view.check_trackers),
            Check(name="disk, lost engines, failed orders", every_s=LOOK_S, look=self._parts.alarms.look),
            Check(name="train steps and records", every_s=0.0, look=self._read),
            Check(name="stragglers", every_s=0.0, look=view.report_stragglers),
            Check(name="alarms and learning signal", every_s=0.0, look=view.send_alarms),
            Check(name="panel", every_s=0.0, look=self._draw),
            Check(name="limit of the stop", every_s=0.0, look=self._look_at_stop, act=_run_failed),
            Check(name="stall", every_s=0.0, look=self._look_at_stall, act=_services_lost),
        ]

    def run(self) -> RunEnd:
        """Monitors the services until the trainer is done.

        Raises `ServicesLost` if the services have to restart, and `RunFailed` with the first cause of a failure that a
        restart would not repair.
        """
        config, supervisor = self._context.config, self._parts.supervisor
        supervisor.watch_steps()
        with Monitor(self.checks()) as monitor:
            while True:
                ends = self._step >= config.run.steps or self._bus.lost is not None
                monitor.tick(at_once=("workers",) if ends else ())
                if self._health.done(TRAINER):
                    break
                time.sleep(TICK_S)
            self._message = ""
            monitor.tick(only=SHOWN)
            finished = self._last_progress().version >= config.run.steps
            if finished and config.eval.every:
                self._await_last_evaluation(monitor)
            self._message = ""
            monitor.tick(only=SHOWN)
            # Without a stop request the trainer ended by itself, because all steps are done or run.patience is
            # exhausted.
            stopped = not finished and supervisor.stop_requested()
            return RunEnd(stopped=stopped, progress=self._last_progress())

    # -- workers and bus ----------------------------------------------------------------------------------------------
    def _look_at_workers(self) -> None:
        """Polls the workers. Progress of the trainer in a long operation, such as a checkpoint, resets the watchdog."""
        self._health.check(bus_lost=self._bus.lost, step=self._step)
        self._services.record_statuses({name: beat.status for name, beat in self._health.beats.items() if beat.status})
        progress = self._health.progress(TRAINER)
        if progress != self._progress:
            self._progress = progress
            self._watchdog.moved()

    def _look_at_stall(self) -> Finding | None:
        if self._health.done(TRAINER):
            return None
        return self._watchdog.look(self._health.beats, self._health.roles, step=self._step)

    def _answer_stall_requests(self) -> None:
        self._stall_requests.check(partial(self._watchdog.report, dict(self._health.beats), step=self._step))

    def _last_progress(self) -> BusProgress:
        try:
            return blocking(self._services.bus.progress(timeout_s=CALL_TIMEOUT_S))
        except BusLost as error:
            raise ServicesLost("the bus died", log=str(error)) from error

    # -- engines ------------------------------------------------------------------------------------------------------
    def _move_engines(self) -> None:
        self._engines.tick(self._health.beats, ended=self._health.ended)

    def _move_orders(self) -> None:
        stopping = self._stopping_since is not None
        if self._orders is not None:
            trained = self._step > self._context.start_step
            self._orders.tick(self._health.beats, step=self._step, trained=trained, stopping=stopping)
        if self._autoscaler is not None:
            self._autoscaler.tick(self._parts.view.records, self._health.beats, stopping=stopping)

    def _record_engines(self) -> None:
        self._engine_numbers.record(self._health.beats, step=self._step)

    def _record_processes(self) -> None:
        self._process_numbers.record(self._health.beats, step=self._step)

    # -- progress and panel -------------------------------------------------------------------------------------------
    def _read(self) -> None:
        progress = self._bus.progress
        if progress is not None and progress.version != self._step:
            self._step = progress.version
            self._watchdog.moved()
            self._parts.supervisor.report_trained()
            self._parts.recoveries.step_done()
            _deploy(self._context, self._parts)
        self._parts.view.read(step=self._step, progress=progress)

    def _draw(self) -> None:
        self._parts.view.draw(progress=self._bus.progress, roles=self._health.roles, message=self._message)

    # -- the end ------------------------------------------------------------------------------------------------------
    def _look_for_stop(self) -> None:
        """Asks the services to stop. If no train step is done, reports this, and the supervisor kills the services.

        The metrics of a step appear shortly before the bus has recorded the step, so the check waits a second for the
        bus.
        """
        supervisor = self._parts.supervisor
        if not supervisor.stop_requested() or self._stopping_since is not None:
            return
        self._stopping_since, self._message = time.monotonic(), "stopping: a checkpoint is written"
        has_own_ray = self._context.config.launcher.ray_address is None
        if has_own_ray and not supervisor.trained and not supervisor.ordered:
            start = self._context.start_step
            try:
                progress = blocking(self._services.bus.wait_progress(start, timeout_s=FIRST_STEP_S))
            except (BusLost, BusTimeout) as error:
                raise ServicesLost("the bus did not answer while the run was being stopped", log=str(error)) from error
            if progress.version == start:
                supervisor.report_untrained()
                return
            supervisor.report_trained()
        self._services.request_stop()

    def _look_at_stop(self) -> Finding | None:
        limit_s = self._context.config.run.stop_timeout_s
        if self._stopping_since is None or self._health.done(TRAINER):
            return None
        if time.monotonic() - self._stopping_since <= limit_s:
            return None
        return Finding(
            failed_part="the trainer", how=f"did not stop within {limit_s:.0f} s, a tenth of run.stall_timeout_s"
        )

    def _await_last_evaluation(self, monitor: Monitor) -> None:
        """Waits for the end of the last evaluation. Returns at once if a stop is requested.

        Raises `RunFailed` if the evaluation does not end within run.stall_timeout_s.
        """
        limit = self._context.config.run.stall_timeout_s
        deadline = time.monotonic() + limit
        self._message = "the last evaluation is under way"
        while not (self._parts.supervisor.stop_requested() or self._services.wait_evaluated(STATUS_S)):
            if time.monotonic() > deadline:
                raise RunFailed(f"the last evaluation did not come within run.stall_timeout_s={limit:.0f} s")
            monitor.tick(only=("relax stall", "workers", *SHOWN))
            time.sleep(TICK_S)


def _services_lost(finding: Finding) -> NoReturn:
    raise ServicesLost(str(finding))


def _run_failed(finding: Finding) -> NoReturn:
    raise RunFailed(str(finding))
