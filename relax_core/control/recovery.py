"""Recovers a run in tier 2: all services start again from the newest checkpoint, within the same Ray.

Each attempt has its own Ray namespace and its own folder of weights. A remaining process of an earlier attempt finds no
service of the new one, and the weight versions of the two attempts do not mix.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from ray.exceptions import RayError

from relax_core.bus.journal import LedgerUnwritable
from relax_core.config.modality import media_kinds
from relax_core.contracts.bus import BusLost, BusTimeout
from relax_core.control.autoscaler import Autoscaler
from relax_core.control.controller import Controller, RunEnd
from relax_core.control.controller_process import SupervisorPipe
from relax_core.control.engine_changes import EngineChanges, EngineProbe
from relax_core.control.engine_orders import EngineOrders
from relax_core.control.engine_set import EngineSet
from relax_core.control.host.run_paths import SHARED_MEMORY
from relax_core.control.process_numbers import EngineNumbers, ProcessNumbers
from relax_core.control.recoveries import FROM_CHECKPOINT, Recoveries, RunFailed, ServicesLost, run_failed
from relax_core.control.resume import ResumePoint, find_resume_point
from relax_core.control.run_alarms import RunAlarms
from relax_core.control.run_view import RunView
from relax_core.control.serve_deployments import ServeDeployments
from relax_core.control.services import Services
from relax_core.control.stall_report import Watchdog
from relax_core.control.worker_health import BusWatch, HealthManager
from relax_core.observe.event_log import PROCESS, EventWriter
from relax_core.roles.role_context import ENGINE, RunContext
from relax_core.server.order_book import OrderBook

MEDIA = "media"  # the name of the folder of media items


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Holds the parts of a run that exist beside all attempts of its services.

    ``events`` writes what the controller reports. ``ray_lost`` ends this process, so
    that the supervisor starts another one with a new Ray. ``engines`` are those of the run, and ``book`` holds
    the orders for them and the autoscaler's decisions; it is None without a gateway. ``alarms`` tells somebody what
    happens.
    """

    events: EventWriter
    serve_deployments: ServeDeployments
    view: RunView
    recoveries: Recoveries
    supervisor: SupervisorPipe
    ray_lost: Callable[[str], NoReturn]
    engines: EngineSet
    book: OrderBook | None
    alarms: RunAlarms


def attempt(context: RunContext, number: int, point: ResumePoint | None) -> RunContext:
    """Returns the context of the services for their start number ``number``, counted from 0.

    Each has its own folder of media items: whatever a process of an earlier attempt writes or removes there, this
    attempt does not see it.
    """
    weights_folder = context.weights_folder / str(number)
    return replace(
        context,
        namespace=f"{context.run_namespace}-{number}",
        weights_folder=weights_folder,
        media_folder=_media_folder(context, number) if media_kinds(context.config) else None,
        resume_from=point.folder if point else None,
        start_step=point.step if point else 0,
    )


def _media_folder(context: RunContext, number: int) -> Path:
    """Returns the folder of media items of a start of the services, which is inside its folder of weights.

    In a joined Ray, the weights are on a disk that all nodes see, and the media in the shared memory of each node.
    """
    if context.config.launcher.ray_address is None:
        return context.weights_folder / str(number) / MEDIA
    return SHARED_MEMORY / f"{context.weights_folder.name}-{number}-{MEDIA}"


def run_services(context: RunContext, resume: ResumePoint | None, parts: RunParts) -> RunEnd:
    """Executes the services until the trainer is done, and restarts them from checkpoints when they are lost.

    ``resume`` is the checkpoint from which the run began. Raises `RunFailed` with the first cause when the run cannot
    recover any more. After a loss during a stop the services recover once, and the stop goes on.
    """
    point = resume
    lost_in_stop = False
    for number in itertools.count():
        one = replace(attempt(context, number, point), attempt=parts.events.begin_attempt(point.step if point else 0))
        try:
            return _run_once(one, point, parts, number=number)
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
            at_step = max(parts.view.step, from_step)  # the view may lack the last step before the loss
            parts.recoveries.begin(FROM_CHECKPOINT, str(lost), at_step=at_step, from_step=from_step)
            for folder in {one.weights_folder, one.shared_weights}:
                if folder.exists():
                    shutil.rmtree(folder)
    raise AssertionError("itertools.count does not end")


def _newest(context: RunContext, lost: ServicesLost) -> ResumePoint | None:
    """Returns the run's newest checkpoint. Raises `RunFailed` if it cannot be read."""
    try:
        return find_resume_point(replace(context.config, resume="auto"))
    except ValueError as error:
        raise RunFailed(f"{lost}; the run cannot go on from its checkpoint either: {error}", log=lost.log) from error


def _exhausted(lost: ServicesLost, recoveries: Recoveries, *, limit: int) -> RunFailed:
    """Returns the failure of a run that may not recover again. It names the first cause before the last one."""
    if recoveries.count(FROM_CHECKPOINT) == 0:
        return RunFailed(f"{lost} (run.max_recoveries={limit})", log=lost.log)
    text = f"{recoveries.first_cause(FROM_CHECKPOINT)}; recovered, then: {lost} (run.max_recoveries={limit})"
    return RunFailed(text, log=lost.log)


def _engine_changes(context: RunContext, services: Services, parts: RunParts) -> EngineChanges:
    elastic = context.config.engine.elastic
    return EngineChanges(
        parts.engines,
        services,
        folder=context.weights_folder,
        join_timeout_s=context.config.engine.start_timeout_s,
        drain_timeout_s=elastic.drain_timeout_s,
        probe=EngineProbe(context),
    )


def _engine_orders(context: RunContext, changes: EngineChanges, parts: RunParts) -> EngineOrders | None:
    """Returns what executes the orders of the run's book, or None without a gateway."""
    if parts.book is None:
        return None
    config = context.config
    return EngineOrders(
        parts.book,
        changes,
        parts.engines,
        kind=config.engine.name,
        steps=config.run.steps,
        stop=parts.supervisor.order_stop,
    )


def _autoscaler(context: RunContext, parts: RunParts) -> Autoscaler | None:
    """Returns what orders engines by itself, if it is on; None without a gateway."""
    return None if parts.book is None else Autoscaler(context.config, parts.book)


def _watchdog(context: RunContext, services: Services, alarms: RunAlarms) -> Watchdog:
    event = ("stalled", "no train step")
    return Watchdog(context, services, stalled=partial(alarms.happened, *event), goes_on=partial(alarms.over, *event))


def _run_once(context: RunContext, point: ResumePoint | None, parts: RunParts, *, number: int) -> RunEnd:
    settings = context.config.run
    parts.engines.begin(context.weights_folder)
    snapshot = point.snapshot if point else None
    try:
        services = Services(context, snapshot, engines=parts.engines)
    except (BusLost, BusTimeout, RayError) as error:
        lost = ServicesLost(f"the services did not start: {error}")
        if number > 0 and context.config.launcher.ray_address is None:  # a new start in this Ray was not enough
            parts.ray_lost(str(lost))
        raise lost from error
    if parts.recoveries.count(FROM_CHECKPOINT) == 0:  # after a recovery, Serve deployments wait for the next train step
        parts.serve_deployments.follow(context.namespace)
    changes = _engine_changes(context, services, parts)
    try:
        with BusWatch(services.bus, heartbeat_timeout_s=settings.heartbeat_timeout_s) as bus:
            end = Controller(
                context,
                services,
                bus=bus,
                serve_deployments=parts.serve_deployments,
                recoveries=parts.recoveries,
                view=parts.view,
                health=HealthManager(services, parts.recoveries, heartbeat_timeout_s=settings.heartbeat_timeout_s),
                watchdog=_watchdog(context, services, parts.alarms),
                engines=changes,
                engine_numbers=EngineNumbers(
                    parts.engines,
                    record=partial(parts.events.record, ENGINE),
                    add_decoding=parts.view.stragglers.add_decoding,
                ),
                process_numbers=ProcessNumbers(
                    bus_pid=services.bus_pid if context.config.launcher.ray_address is None else None,
                    record=partial(parts.events.record, PROCESS),
                ),
                orders=_engine_orders(context, changes, parts),
                autoscaler=_autoscaler(context, parts),
                supervisor=parts.supervisor,
            ).run()
    except ServicesLost:
        services.kill()
        raise
    except KeyboardInterrupt:  # the user has sent a second stop signal
        with suppress(LedgerUnwritable, BusTimeout):
            services.close_at_once(reason="the run was ended at once")
        raise
    except BaseException as error:
        failed = error.worker if isinstance(error, RunFailed) else None
        with suppress(LedgerUnwritable, BusTimeout):  # the first error is raised, not an error that follows from it
            services.close(reason="the run has ended", failed=failed)
        raise
    try:
        services.close(reason="the run has ended")
    except (LedgerUnwritable, BusTimeout) as error:
        raise run_failed("the ledger is not complete", error) from error
    return end
