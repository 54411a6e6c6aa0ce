"""One run on this machine, from a validated configuration to an exit code."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from relax_core.config.schema import RelaxConfig
from relax_core.control.controller import Controller, RunEnd
from relax_core.control.finish import RunRecords, collect, show_end, write_end
from relax_core.control.ray_session import RaySession
from relax_core.control.resume import ResumePoint, find_resume_point
from relax_core.control.signals import StopSignals
from relax_core.control.watch import RunFailed
from relax_core.observe.panel import Panel
from relax_core.roles.context import RunContext
from relax_core.tools.make_tiny import tiny_model_folder

FAILED = 1
USAGE = 2
SHARED_MEMORY = Path("/dev/shm")


def run_local(config: RelaxConfig) -> int:
    """Runs to the end. Returns 0; 1 where the run failed; 2 for a checkpoint that cannot be resumed; 128 + signal
    where it was stopped. Leaves no process, no port and no folder but the run's own."""
    started = _process_start()
    try:
        resume = find_resume_point(config)
    except ValueError as error:
        print(f"relax: {error}", file=sys.stderr)
        return USAGE
    run_dir = Path(config.run.dir)
    namespace = f"relax-{os.getpid()}-{secrets.token_hex(4)}"  # tells whose a folder is that a kill left behind
    session = RaySession(config.launcher, namespace=namespace, log_dir=run_dir / "logs")
    with StopSignals() as signals, _weights_folder(namespace) as weights_folder, ThreadPoolExecutor(1) as pool:
        model = pool.submit(_model_folder, config)
        with session:
            context = RunContext(
                config=config,
                namespace=namespace,
                run_dir=run_dir,
                model_folder=model.result(timeout=config.run.start_timeout_s),
                weights_folder=weights_folder,
                token_file=session.token_file,
                resume_from=resume.folder if resume else None,
                start_step=resume.step if resume else 0,
            )
            outcome, records = _run_services(context, resume, signals, session)
    meta = {"outcome": outcome, "wall_s": time.time() - started, "overrides": sys.argv[1:]}
    summary = write_end(run_dir, records, meta=meta, started=started)
    if outcome.startswith("failed"):
        print(f"relax: {outcome}\nLogs: {run_dir / 'logs'}", file=sys.stderr)
        return FAILED
    show_end(run_dir, records, summary)
    return 128 + signals.received if outcome == "stopped" and signals.received else 0


def _run_services(
    context: RunContext, resume: ResumePoint | None, signals: StopSignals, session: RaySession
) -> tuple[str, RunRecords]:
    from relax_core.control.services import Services

    config = context.config
    services = Services(context, resume.snapshot if resume else None)
    try:
        title = f"{config.algo.name} · {config.model.name} · {config.data.name} · {config.mode.name.value}"
        with Panel(config.run.steps, context.run_dir, title, live=config.run.panel) as panel:
            controller = Controller(context, services, panel=panel, stop_requested=signals.requested)
            outcome = _outcome(controller)
        if outcome.startswith("failed"):
            session.keep_logs()
        progress = services.bus.progress(timeout_s=config.bus.call_timeout_s)
        return outcome, collect(services.metrics, progress)
    finally:
        services.close(reason="the run has ended")


def _outcome(controller: Controller) -> str:
    try:
        end: RunEnd = controller.run()
    except RunFailed as failure:
        return f"failed: {failure}"
    return "stopped" if end.stopped else "finished"


def _model_folder(config: RelaxConfig) -> Path:
    if config.model.path is not None:
        return Path(config.model.path)
    assert config.model.builtin is not None and config.model.task is not None, "validated"
    return tiny_model_folder(config.model.builtin, task=config.model.task)


@contextmanager
def _weights_folder(namespace: str) -> Iterator[Path]:
    folder = SHARED_MEMORY / namespace
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _process_start() -> float:
    """Unix time at which this process began."""
    import psutil

    return float(psutil.Process(os.getpid()).create_time())
