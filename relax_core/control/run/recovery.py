"""Tier 2: when services are lost, all of them start again from the newest checkpoint, within the same Ray.

Each attempt has its own Ray namespace and its own folder of weights. Whoever is left of an earlier one finds nobody
there, and versions that were rolled back never meet those that are trained anew.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from ray.exceptions import RayError

from relax_core.bus.ledger.journal import LedgerUnwritable
from relax_core.contracts.bus import BusLost, BusTimeout
from relax_core.control.health.bus_watch import BusWatch
from relax_core.control.health.watchdog import Watchdog
from relax_core.control.health.worker_health import HealthManager
from relax_core.control.health.worker_states import RunFailed, ServicesLost, run_failed
from relax_core.control.run.controller import Controller, RunEnd
from relax_core.control.run.recovery_log import FROM_CHECKPOINT, Recoveries
from relax_core.control.run.resume import ResumePoint, find_resume_point
from relax_core.control.run.run_view import RunView
from relax_core.control.run.serve_deployments import ServeDeployments
from relax_core.control.run.services import Services
from relax_core.observe.service.metrics_actor import MetricsClient, MetricsUnavailable
from relax_core.roles.process.role_context import RunContext

METRICS_S = 10.0
RETRY_S = 0.2


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What lives as long as the run, beside its services. ``marked`` waits until the metrics know where it began.
    ``trained`` is told that a train step is done. ``ray_lost`` ends this process, so that another makes a new Ray."""

    metrics: MetricsClient
    marked: Callable[[], None]
    serve_deployments: ServeDeployments
    view: RunView
    book: Recoveries
    trained: Callable[[], None]
    stop_requested: Callable[[], bool]
    ray_lost: Callable[[str], NoReturn]


def attempt(context: RunContext, number: int, point: ResumePoint | None) -> RunContext:
    """The context of the run's services when they start for the ``number``-th time, counted from 0."""
    return replace(
        context,
        namespace=f"{context.run_namespace}-{number}",
        weights_folder=context.weights_folder / str(number),
        resume_from=point.folder if point else None,
        start_step=point.step if point else 0,
    )


def run_services(context: RunContext, resume: ResumePoint | None, parts: RunParts) -> RunEnd:
    """Keeps services going until the trainer is done. ``resume``: where the run began. Raises `RunFailed` with the
    first cause, once nothing more can be recovered. Of a loss during a stop they recover once, and the stop goes on."""
    point = resume
    lost_in_stop = False
    for number in itertools.count():
        one = attempt(context, number, point)
        try:
            return _run_once(one, point, parts, number=number)
        except ServicesLost as lost:
            if lost_in_stop:
                raise RunFailed(f"{lost}, while the run was being stopped", log=lost.log) from lost
            lost_in_stop = parts.stop_requested()
            limit = context.config.run.max_recoveries
            if parts.book.count(FROM_CHECKPOINT) >= limit:
                raise _exhausted(lost, parts.book, limit=limit) from lost
            point = _newest(context, lost) or resume
            for left in point.left if point else ():
                parts.view.tell(left)
            from_step = point.step if point else 0
            at_step = max(parts.view.step, from_step)  # the last one before the loss may not have been seen
            parts.book.begin(FROM_CHECKPOINT, str(lost), at_step=at_step, from_step=from_step)
            if one.weights_folder.exists():
                shutil.rmtree(one.weights_folder)
            _mark_resume(parts, from_step)
    raise AssertionError("itertools.count ends never")


def _newest(context: RunContext, lost: ServicesLost) -> ResumePoint | None:
    """The run's newest checkpoint; `RunFailed` where it cannot be read."""
    try:
        return find_resume_point(replace(context.config, resume="auto"))
    except ValueError as error:
        raise RunFailed(f"{lost}; nor can the run go on from its checkpoint: {error}", log=lost.log) from error


def _mark_resume(parts: RunParts, step: int) -> None:
    """Metrics may be restarting too. Without the mark, figures of steps that are done again stay in files."""
    deadline = time.monotonic() + METRICS_S
    while True:
        try:
            parts.metrics.mark_resume(step)
            return
        except MetricsUnavailable as error:
            if time.monotonic() > deadline:
                parts.view.tell(str(error))
                return
            time.sleep(RETRY_S)


def _exhausted(lost: ServicesLost, book: Recoveries, *, limit: int) -> RunFailed:
    """The first cause is what is told; what came after it may be its doing."""
    if book.count(FROM_CHECKPOINT) == 0:
        return RunFailed(f"{lost} (run.max_recoveries={limit})", log=lost.log)
    text = f"{book.first_cause(FROM_CHECKPOINT)}; recovered, then: {lost} (run.max_recoveries={limit})"
    return RunFailed(text, log=lost.log)


def _run_once(context: RunContext, point: ResumePoint | None, parts: RunParts, *, number: int) -> RunEnd:
    settings = context.config.run
    try:
        services = Services(context, point.snapshot if point else None, before_rollout=parts.marked)
    except (BusLost, BusTimeout, RayError) as error:
        lost = ServicesLost(f"the services did not start: {error}")
        if number > 0 and context.config.launcher.ray_address is None:  # they had to start again, and it was not enough
            parts.ray_lost(str(lost))
        raise lost from error
    if parts.book.count(FROM_CHECKPOINT) == 0:  # in a recovery the Serve deployments wait until training goes on
        parts.serve_deployments.follow(context.namespace)
    try:
        with BusWatch(services.bus, heartbeat_timeout_s=settings.heartbeat_timeout_s) as bus:
            end = Controller(
                context,
                services,
                bus=bus,
                serve_deployments=parts.serve_deployments,
                book=parts.book,
                view=parts.view,
                health=HealthManager(services, parts.book, heartbeat_timeout_s=settings.heartbeat_timeout_s),
                watchdog=Watchdog(context, services),
                trained=parts.trained,
                stop_requested=parts.stop_requested,
            ).run()
    except ServicesLost:
        services.kill()
        raise
    except KeyboardInterrupt:  # the user has asked twice
        with suppress(LedgerUnwritable, BusTimeout):
            services.close_at_once(reason="the run was ended at once")
        raise
    except BaseException as error:
        failed = error.worker if isinstance(error, RunFailed) else None
        with suppress(LedgerUnwritable, BusTimeout):  # what ended the run is told, not what came of it
            services.close(reason="the run has ended", failed=failed)
        raise
    try:
        services.close(reason="the run has ended")
    except (LedgerUnwritable, BusTimeout) as error:
        raise run_failed("the ledger is not complete", error) from error
    return end
