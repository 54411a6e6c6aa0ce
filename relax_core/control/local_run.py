"""Executes one run on this machine, from a validated configuration to an exit code.

The start has this order: Ray with the monitor of its daemons (a thread makes built-in models in the meantime); the
event log, the trackers and the run reporter; the gateway's orders; the services (`controller.py`). The end has the
reverse order; the summary is written last.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from relax_core.config.engine_checks import engine_count, offline_rows
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.bus import BusProgress
from relax_core.contracts.outage import is_exhausted
from relax_core.control.controller_process import SupervisorPipe
from relax_core.control.engine_set import EngineSet
from relax_core.control.finish import Outcome, collect, notify_end, report_failure, show_end, write_outcome
from relax_core.control.host.ray_session import RaySession, RayUnstarted
from relax_core.control.host.run_paths import RunPaths
from relax_core.control.model_folders import making_models
from relax_core.control.recoveries import FROM_CHECKPOINT, Recoveries, RunFailed, recoveries_file, run_failed
from relax_core.control.resume import ResumePoint
from relax_core.control.run_alarms import RunAlarms
from relax_core.control.run_reporter import EarlierRecords, RunReporter, open_reporter
from relax_core.control.supervisor import Attempt
from relax_core.data.data_identity import data_digest
from relax_core.observe.event_log import CONTROLLER, EventWriter
from relax_core.observe.panel import Panel
from relax_core.observe.trackers.tracker_process import Trackers
from relax_core.registry import short_name
from relax_core.roles.gpu_turns import visible_gpus
from relax_core.roles.process_placement import roles_of
from relax_core.roles.role_context import RunContext, worker_name

if TYPE_CHECKING:
    from relax_core.server.engine_order_store import EngineOrderStore

FAILED = 1
PRELOADED = ("relax_core.train.megatron_rank", "relax_core.rollout.rollout_loop")  # torch, Megatron, shared modules


def run_local(
    config: RelaxConfig, resume: ResumePoint | None, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe
) -> int:
    """Executes the run in this process and returns its exit code.

    The code is 0 for a finished run, 1 for a failed run, and 128 + N for a run that signal N stopped.
    """
    started = attempt.started
    run_dir = Path(config.run.dir)
    alarms = RunAlarms(config, again=attempt.number > 0)
    try:
        outcome = _in_session(config, resume, paths, attempt, supervisor, alarms)
    except KeyboardInterrupt:  # the supervisor ends the run at once
        assert supervisor.stop_signal is not None
        print("relax: ended at once, without a checkpoint", file=sys.stderr)
        return 128 + supervisor.stop_signal
    except RayUnstarted as error:
        supervisor.report_ray_unstarted(str(error))
        return FAILED
    except (ValueError, RuntimeError, OSError) as error:
        if is_exhausted(error):
            supervisor.report_lost(f"the controller failed: {error}")
            return FAILED
        outcome = Outcome(word="failed", failure=run_failed("the run did not start", error))
    if outcome.failure is not None:
        report_failure(outcome, config, started=started)
        notify_end(alarms, outcome, run_dir)
        return FAILED
    assert outcome.records is not None
    try:
        summary = write_outcome(outcome, config, started=started)
    except OSError as error:
        print(f"relax: failed: the run ended, but its summary is not written: {error}", file=sys.stderr)
        return FAILED
    show_end(run_dir, outcome.records, summary)
    notify_end(alarms, outcome, run_dir)
    return 128 + supervisor.stop_signal if outcome.word == "stopped" and supervisor.stop_signal else 0


def _in_session(
    config: RelaxConfig,
    resume: ResumePoint | None,
    paths: RunPaths,
    attempt: Attempt,
    supervisor: SupervisorPipe,
    alarms: RunAlarms,
) -> Outcome:
    """Starts Ray, executes the run and ends Ray. This process exits if Ray is lost."""
    run_dir = Path(config.run.dir)

    def ray_lost(cause: str) -> NoReturn:
        session.keep_logs()
        if session.started:
            supervisor.report_lost(f"{cause}, and the controller with it")
        else:
            supervisor.report_ray_unstarted(f"{cause} before Ray had started.")
        os._exit(FAILED)  # the main thread may wait for Ray forever

    session = RaySession(
        config.launcher,
        paths,
        log_dir=run_dir / "logs",
        placement=config.placement,
        start_timeout_s=config.run.start_timeout_s,
        preloaded=() if config.placement.gpus_per_node else PRELOADED,
        max_restarts=config.run.max_restarts,
        frozen_after_s=config.run.heartbeat_timeout_s,
        lost=ray_lost,
    )
    title = f"{config.algo.name} · {config.model.name} · {short_name(config.data.name)} · {config.mode.name.value}"
    panel = Panel(config.run.steps, run_dir, title, live=config.run.panel)
    workers = [worker_name(role, rank) for role, count in roles_of(config).items() for rank in range(count)]
    with panel, ThreadPoolExecutor(1) as pool:
        panel.starting(workers, first="Ray")
        models = making_models(config, pool)
        with session:
            folders = models()
            context = RunContext(
                config=config,
                run_namespace=paths.namespace,
                namespace=paths.namespace,
                run_dir=run_dir,
                model_folder=folders.student,
                weights_folder=paths.weights_folder,
                token_file=session.token_file,
                resume_from=resume.folder if resume else None,
                start_step=resume.step if resume else 0,
                restarted=attempt.number > 0,
                data_digest=data_digest(config.data, offline=offline_rows(config)),
                teacher_folders=folders.teachers,
                judge_folders=folders.judges,
                gpus=visible_gpus(config.placement),
            )
            return _run_services(context, resume, attempt, supervisor, session, panel, alarms, ray_lost=ray_lost)


def _run_services(
    context: RunContext,
    resume: ResumePoint | None,
    attempt: Attempt,
    supervisor: SupervisorPipe,
    session: RaySession,
    panel: Panel,
    alarms: RunAlarms,
    *,
    ray_lost: Callable[[str], NoReturn],
) -> Outcome:
    from relax_core.control.controller import RunParts, run_services

    config = context.config
    earlier = EarlierRecords.of(context.run_dir)
    events, trackers = EventWriter(context.run_dir, CONTROLLER), Trackers(config.tracker, context.run_dir)
    collected = partial(collect, events, trackers, run_dir=context.run_dir, rollout_workers=config.rollout.workers)
    with ExitStack() as undo:
        undo.callback(trackers.end)
        with panel:  # the panel closes before the services end
            view = open_reporter(context, panel, events, trackers, earlier, alarms)
            at_step = max(earlier.steps, context.start_step)
            recoveries = _recoveries(context, attempt, view, alarms, at_step=at_step)
            order_store, engines = _orders_and_engines(context, attempt, undo, alarms)
            serve = None
            if config.run.serve:
                from relax_core.control.serve_deployments import ServeDeployments

                serve = ServeDeployments(context)
                undo.callback(serve.close, timeout_s=config.run.stop_timeout_s)
            parts = RunParts(
                events=events,
                serve=serve,
                view=view,
                recoveries=recoveries,
                supervisor=supervisor,
                ray_lost=ray_lost,
                engines=engines,
                order_store=order_store,
                alarms=alarms,
                checks=session.checks(),
            )
            failure: RunFailed | None = None
            progress: BusProgress | None = None
            stopped = False
            try:
                end = run_services(context, resume, parts)
                stopped, progress = end.stopped, end.progress
            except RunFailed as error:
                session.keep_logs()
                failure, progress = error, view.progress
        return Outcome(
            word="failed" if failure is not None else "stopped" if stopped else "finished",
            failure=failure,
            records=collected(progress) if progress is not None else None,
            recoveries=recoveries.as_records(),
            stragglers=view.reported_stragglers(),
        )


def _recoveries(
    context: RunContext, attempt: Attempt, view: RunReporter, alarms: RunAlarms, *, at_step: int
) -> Recoveries:
    """Returns the recoveries of the run.

    A restarted controller adds a recovery for its restart, after ``at_step`` train steps.
    """

    def begun(tier: int, cause: str) -> None:
        if tier == FROM_CHECKPOINT:
            alarms.happened("recovery", "tier 2", cause)
        else:
            alarms.restarted(cause)

    recoveries = Recoveries(recoveries_file(context.run_dir), report=view.report, begun=begun)
    if attempt.causes:
        recoveries.load()
        recoveries.begin(FROM_CHECKPOINT, attempt.causes[-1], at_step=at_step, from_step=context.start_step)
    return recoveries


def _orders_and_engines(
    context: RunContext, attempt: Attempt, undo: ExitStack, alarms: RunAlarms
) -> tuple[EngineOrderStore | None, EngineSet]:
    """Returns the order book (None without a gateway) and the engines of the run. ``undo`` ends the open orders.

    A new command turns the autoscaler on or off as its configuration says.
    """
    config = context.config
    if attempt.gateway is None:
        return None, EngineSet(engine_count(config))
    from relax_core.control.engine_orders import end_open_orders, failed_orders, open_order_store, order_answers

    order_store, engines = open_order_store(context.run_dir, count=engine_count(config), anew=attempt.number == 0)
    if attempt.number == 0:
        order_store.enable_autoscaler(config.engine.autoscaler.enabled)
    undo.callback(end_open_orders, order_store)
    undo.enter_context(order_answers(config, order_store, attempt.gateway))
    alarms.watch(engine_lost=engines.lost, order_failed=partial(failed_orders, order_store))
    undo.callback(alarms.stop_watching)  # before the open orders are ended
    return order_store, engines
