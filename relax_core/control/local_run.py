"""Executes one run on this machine, from a validated configuration to an exit code."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from relax_core.bus.ledger_reader import LedgerFile
from relax_core.config.schema import RelaxConfig
from relax_core.control.controller_process import SupervisorPipe
from relax_core.control.engine_set import EngineSet
from relax_core.control.finish import RunRecords, collect, show_end, write_end
from relax_core.control.host.ray_session import RaySession, RayUnstarted
from relax_core.control.host.run_paths import RunPaths
from relax_core.control.model_folders import judge_folders, teacher_folders
from relax_core.control.monitor import RayWatch
from relax_core.control.recoveries import FROM_CHECKPOINT, Recoveries, RunFailed, recoveries_file, run_failed
from relax_core.control.resume import ResumePoint
from relax_core.control.run_alarms import RunAlarms
from relax_core.control.run_view import RunView
from relax_core.control.supervisor import Attempt
from relax_core.data.data_identity import data_digest
from relax_core.observe.event_log import ACTOR, CONTROLLER, EventWriter, each_metric, read_texts
from relax_core.observe.panel import Panel
from relax_core.observe.sample_log import NewestSamples
from relax_core.observe.stragglers import STRAGGLER, StragglerWatch, told_stragglers
from relax_core.observe.summary import SignalWatch
from relax_core.observe.trackers.tracker_process import Trackers
from relax_core.registry import short_name
from relax_core.roles.process_placement import equal_trainers, roles_of
from relax_core.roles.role_context import ENGINE, RunContext, worker_name
from relax_core.server.order_book import OrderBook, order_history
from relax_core.server.orders import read_room
from relax_core.tools.make_tiny import tiny_model_folder

FAILED = 1
PRELOADED = ("relax_core.train.rank", "relax_core.rollout.rollout_loop")  # torch, Megatron, and what workers share
FAILURE_LOG = "failure.log"
FAILED_ORDERS = 20  # of the newest orders, those that failed are told
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Says how the run ended.

    ``records`` is None if the run failed before there was anything to report.
    """

    word: Literal["finished", "stopped", "failed"]
    failure: RunFailed | None = None
    records: RunRecords | None = None
    recoveries: Sequence[Mapping[str, Any]] = ()
    stragglers: Sequence[Mapping[str, Any]] = ()


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
        outcome = _Outcome(word="failed", failure=run_failed("the run did not start", error))
    if outcome.failure is not None:
        _report_failure(outcome, config, started=started)
        _tell_end(alarms, outcome, run_dir)
        return FAILED
    assert outcome.records is not None
    try:
        summary = _write_end(outcome, config, started=started)
    except OSError as error:
        print(f"relax: failed: the run ended, but its summary is not written: {error}", file=sys.stderr)
        return FAILED
    show_end(run_dir, outcome.records, summary)
    _tell_end(alarms, outcome, run_dir)
    return 128 + supervisor.stop_signal if outcome.word == "stopped" and supervisor.stop_signal else 0


def _tell_end(alarms: RunAlarms, outcome: _Outcome, run_dir: Path) -> None:
    """Tells somebody how the run ended, and prints what could not be told."""
    why = f"{outcome.failure}" if outcome.failure is not None else f"in {run_dir}"
    for line in alarms.close(outcome.word, why):
        print(f"relax: {line}", file=sys.stderr)


def _write_end(outcome: _Outcome, config: RelaxConfig, *, started: float) -> dict[str, Any]:
    assert outcome.records is not None
    word = outcome.word if outcome.failure is None else f"{outcome.word}: {outcome.failure}"
    meta = {"outcome": word, "wall_s": time.time() - started, "overrides": sys.argv[1:]}
    meta |= {"seed": config.seed, "repeatable": config.repeatable, "recoveries": list(outcome.recoveries)}
    meta |= {"keep_best": config.run.keep_best, "stragglers": list(outcome.stragglers)}
    if config.gateway.name != "none":
        run_dir = Path(config.run.dir)
        meta |= order_history(run_dir, sampled=_sampled(run_dir), repeatable=config.repeatable)
    if (sandbox := getattr(config.env, "sandbox", None)) is not None:  # of an environment that runs the model's code
        meta["sandbox"] = sandbox
    return write_end(Path(config.run.dir), outcome.records, meta=meta, started=started)


def _sampled(run_dir: Path) -> dict[str, tuple[int, int]]:
    """Returns how many samples and tokens each engine has sampled, by the ledger; nothing before there is one."""
    try:
        with LedgerFile(run_dir / "ledger.sqlite") as ledger:
            return {engine: (share.samples, share.tokens) for engine, share in ledger.engine_shares().items()}
    except FileNotFoundError:
        return {}


def _report_failure(outcome: _Outcome, config: RelaxConfig, *, started: float) -> None:
    """Prints the cause, and writes its traceback to the logs and a summary unless the disk is full."""
    assert outcome.failure is not None
    log = Path(config.run.dir) / "logs" / FAILURE_LOG
    print(f"relax: failed: {outcome.failure}", file=sys.stderr)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"{outcome.failure}\n\n{outcome.failure.log}\n", encoding="utf-8")
        if outcome.records is not None:
            _write_end(outcome, config, started=started)
        print(f"relax: more in {log}", file=sys.stderr)
    except OSError as error:
        print(f"relax: the logs and the summary are not complete: {error}", file=sys.stderr)


def _in_session(
    config: RelaxConfig,
    resume: ResumePoint | None,
    paths: RunPaths,
    attempt: Attempt,
    supervisor: SupervisorPipe,
    alarms: RunAlarms,
) -> _Outcome:
    """Starts Ray, executes the run and ends Ray. If Ray is lost meanwhile, this process exits."""
    run_dir = Path(config.run.dir)

    def ray_lost(cause: str) -> NoReturn:
        session.keep_logs()
        supervisor.report_ray_lost(cause)
        os._exit(FAILED)  # the main thread may wait for Ray without end

    session = RaySession(
        config.launcher,
        paths,
        log_dir=run_dir / "logs",
        placement=config.placement,
        start_timeout_s=config.run.start_timeout_s,
        preloaded=() if config.placement.gpus_per_node else PRELOADED,
    )
    title = f"{config.algo.name} · {config.model.name} · {short_name(config.data.name)} · {config.mode.name.value}"
    panel = Panel(config.run.steps, run_dir, title, live=config.run.panel)
    workers = [worker_name(role, rank) for role, count in roles_of(config).items() for rank in range(count)]
    with panel, ThreadPoolExecutor(1) as pool:
        panel.starting(workers, first="Ray")
        model = pool.submit(_model_folder, config)
        teachers = pool.submit(lambda: teacher_folders(config, student=model.result()))
        judges = pool.submit(judge_folders, config)
        with (
            session,
            RayWatch(session.daemons, frozen_after_s=config.run.heartbeat_timeout_s, lost=ray_lost),
        ):
            model_folder = made_in_time(model, config, what=f"the model {config.model.builtin}")
            known_teachers = made_in_time(teachers, config, what="a builtin teacher")
            context = RunContext(
                config=config,
                run_namespace=paths.namespace,
                namespace=paths.namespace,
                run_dir=run_dir,
                model_folder=model_folder,
                weights_folder=paths.weights_folder,
                token_file=session.token_file,
                resume_from=resume.folder if resume else None,
                start_step=resume.step if resume else 0,
                data_digest=data_digest(config.data),
                teacher_folders=known_teachers,
                judge_folders=made_in_time(judges, config, what="a builtin judge"),
            )
            return _run_services(context, resume, attempt, supervisor, session, panel, alarms, ray_lost=ray_lost)


def made_in_time(folder: Future[Made], config: RelaxConfig, *, what: str) -> Made:
    """Returns what a thread makes; raises TimeoutError with the cause if it is not made in the time of a start."""
    limit_s = config.run.start_timeout_s
    try:
        return folder.result(timeout=limit_s)
    except TimeoutError as error:
        if folder.done():  # making it raised this error
            raise
        raise TimeoutError(
            f"run.start_timeout_s={limit_s:g}: {what} is still being made. It is kept when it is made: start the run "
            "again, or raise run.start_timeout_s."
        ) from error


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
) -> _Outcome:
    from relax_core.control.recovery import RunParts, run_services
    from relax_core.control.serve_deployments import ServeDeployments

    config = context.config
    earlier = _earlier_records(context.run_dir)
    events, trackers = EventWriter(context.run_dir, CONTROLLER), Trackers(config.tracker, context.run_dir)
    collected = partial(collect, events, trackers, run_dir=context.run_dir, rollout_workers=config.rollout.workers)
    with ExitStack() as undo:
        undo.callback(trackers.end)
        with panel:  # the panel closes before the services do
            view = _run_view(context, panel, events, trackers, earlier, alarms)
            at_step = max(earlier.steps, context.start_step)
            recoveries = _recoveries(context, attempt, view, alarms, at_step=at_step)
            book, engines = _engines(context, attempt, undo, alarms)
            serve_deployments = ServeDeployments(context, recoveries=recoveries, ray_lost=ray_lost)
            undo.callback(serve_deployments.close, timeout_s=config.run.stop_timeout_s)
            parts = RunParts(
                events=events,
                serve_deployments=serve_deployments,
                view=view,
                recoveries=recoveries,
                supervisor=supervisor,
                ray_lost=ray_lost,
                engines=engines,
                book=book,
                alarms=alarms,
            )
            try:
                end = run_services(context, resume, parts)
            except RunFailed as failure:
                session.keep_logs()
                records = collected(view.progress) if view.progress else None
                return _Outcome(
                    word="failed",
                    failure=failure,
                    records=records,
                    recoveries=recoveries.as_records(),
                    stragglers=view.told_stragglers(),
                )
        return _Outcome(
            word="stopped" if end.stopped else "finished",
            records=collected(end.progress),
            recoveries=recoveries.as_records(),
            stragglers=view.told_stragglers(),
        )


def _run_view(
    context: RunContext,
    panel: Panel,
    events: EventWriter,
    trackers: Trackers,
    earlier: _Earlier,
    alarms: RunAlarms,
) -> RunView:
    most = context.config.rollout.max_new_tokens
    return RunView(
        panel,
        events,
        run_dir=context.run_dir,
        trackers=trackers,
        step=context.start_step,
        signal_watch=SignalWatch(max_new_tokens=most),
        samples=_shown_samples(context),
        stragglers=_straggler_watch(context, earlier),
        alarms=alarms,
    )


def _recoveries(context: RunContext, attempt: Attempt, view: RunView, alarms: RunAlarms, *, at_step: int) -> Recoveries:
    """Returns the recoveries of the run; another attempt is one more, after ``at_step`` train steps."""

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


def _engines(
    context: RunContext, attempt: Attempt, undo: ExitStack, alarms: RunAlarms
) -> tuple[OrderBook | None, EngineSet]:
    """Returns the order book, None without a gateway, and the engines of the run; ``undo`` ends what is open.

    A new command turns the autoscaler on or off as configured.
    """
    from relax_core.control.engine_orders import end_book, open_book
    from relax_core.control.engine_set import limits_of
    from relax_core.server.order_desk import OrderDesk, answering

    config = context.config
    if attempt.gateway is None:
        return None, EngineSet(config.engine.count)
    book, engines = open_book(context.run_dir, count=config.engine.count, anew=attempt.number == 0)
    if attempt.number == 0:
        book.enable_autoscaler(config.engine.autoscaler.enabled)
    undo.callback(end_book, book)
    desk = OrderDesk(book, limits_of(config), read_room(context.run_dir))
    undo.enter_context(answering(attempt.gateway, desk.answer))
    alarms.watch(engine_lost=partial(_lost_engines, engines), order_failed=partial(_failed_orders, book))
    undo.callback(alarms.watch_no_more)  # before the orders that are open are ended
    return book, engines


def _lost_engines(engines: EngineSet) -> dict[str, str]:
    """Returns why added engines were taken out, by their names."""
    return {worker_name(ENGINE, number): why for number, why in engines.failures.items()}


def _failed_orders(book: OrderBook) -> dict[str, str]:
    """Returns why the newest orders failed that did, by their ids."""
    return {order.request_id: order.failure for order in book.orders()[:FAILED_ORDERS] if order.status == "FAILED"}


def _shown_samples(context: RunContext) -> NewestSamples:
    config = context.config
    return NewestSamples(
        context.run_dir, groups=config.run.show_samples, every=config.eval.every, step=context.start_step
    )


@dataclass(frozen=True, kw_only=True)
class _Earlier:
    """Says of which ``sources`` an earlier command in the run's folder has recorded numbers, and its train steps."""

    sources: frozenset[str]
    steps: int


def _earlier_records(run_dir: Path) -> _Earlier:
    """Looks at each record once and keeps none: those of 20,000 train steps take 170 MB."""
    sources, steps = set(), 0
    for record in each_metric(run_dir):
        sources.add(record.source)
        if record.source == ACTOR:
            steps = max(steps, record.step + 1)
    return _Earlier(sources=frozenset(sources), steps=steps)


def _straggler_watch(context: RunContext, earlier: _Earlier) -> StragglerWatch:
    """Returns what compares the run's ranks and engines; what an earlier process told of them is kept."""
    told = told_stragglers(read_texts(context.run_dir, STRAGGLER)) if STRAGGLER in earlier.sources else []
    return StragglerWatch(equal_trainers(context.config), earlier=told)


def _model_folder(config: RelaxConfig) -> Path:
    if config.model.path is not None:
        return Path(config.model.path)
    assert config.model.builtin is not None and config.model.task is not None, "validated"
    return tiny_model_folder(config.model.builtin, task=config.model.task)
