"""One run on this machine, from a validated configuration to an exit code."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from relax_core.config.schema import RelaxConfig
from relax_core.control.controller import Controller
from relax_core.control.finish import RunRecords, collect, show_end, write_end
from relax_core.control.place import RunPlace
from relax_core.control.ray_session import RaySession
from relax_core.control.resume import ResumePoint
from relax_core.control.signals import StopSignals
from relax_core.control.supervisor import Attempt
from relax_core.control.watch import RunFailed, run_failed
from relax_core.observe.panel import Panel
from relax_core.roles.context import RunContext
from relax_core.tools.make_tiny import tiny_model_folder

FAILED = 1
FAILURE_LOG = "failure.log"


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """``failure``: why it failed. ``records``: None where it failed before there was anything to report."""

    word: Literal["finished", "stopped", "failed"]
    failure: RunFailed | None = None
    records: RunRecords | None = None


def run_local(config: RelaxConfig, resume: ResumePoint | None, place: RunPlace, attempt: Attempt) -> int:
    """Runs to the end, in its own process. Returns 0; 1 where the run failed; 128 + signal where it was stopped."""
    started = attempt.started
    run_dir = Path(config.run.dir)
    with StopSignals() as signals:
        try:
            outcome = _in_session(config, resume, place, signals)
        except KeyboardInterrupt:
            assert signals.received is not None
            print("relax: ended at once, without a checkpoint", file=sys.stderr)
            return 128 + signals.received
        except (ValueError, RuntimeError, OSError) as error:
            outcome = _Outcome(word="failed", failure=run_failed("the run did not start", error))
    if outcome.failure is not None:
        _tell_failure(outcome, run_dir, started=started)
        return FAILED
    assert outcome.records is not None
    show_end(run_dir, outcome.records, _write_end(outcome, run_dir, started=started))
    return 128 + signals.received if outcome.word == "stopped" and signals.received else 0


def _write_end(outcome: _Outcome, run_dir: Path, *, started: float) -> dict[str, Any]:
    assert outcome.records is not None
    word = outcome.word if outcome.failure is None else f"{outcome.word}: {outcome.failure}"
    meta = {"outcome": word, "wall_s": time.time() - started, "overrides": sys.argv[1:]}
    return write_end(run_dir, outcome.records, meta=meta, started=started)


def _tell_failure(outcome: _Outcome, run_dir: Path, *, started: float) -> None:
    """The cause on the screen, its traceback in the logs, and a summary; a disk that is full takes neither of them."""
    assert outcome.failure is not None
    log = run_dir / "logs" / FAILURE_LOG
    print(f"relax: failed: {outcome.failure}", file=sys.stderr)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"{outcome.failure}\n\n{outcome.failure.log}\n", encoding="utf-8")
        if outcome.records is not None:
            _write_end(outcome, run_dir, started=started)
        print(f"relax: more in {log}", file=sys.stderr)
    except OSError as error:
        print(f"relax: the logs and the summary are not complete: {error}", file=sys.stderr)


def _in_session(config: RelaxConfig, resume: ResumePoint | None, place: RunPlace, signals: StopSignals) -> _Outcome:
    """The run between the start and the end of its Ray."""
    run_dir = Path(config.run.dir)
    session = RaySession(config.launcher, place, log_dir=run_dir / "logs")
    with ThreadPoolExecutor(1) as pool:
        model = pool.submit(_model_folder, config)
        with session:
            signals.arm()
            context = RunContext(
                config=config,
                namespace=place.namespace,
                run_dir=run_dir,
                model_folder=model.result(timeout=config.run.start_timeout_s),
                weights_folder=place.weights_folder,
                token_file=session.token_file,
                resume_from=resume.folder if resume else None,
                start_step=resume.step if resume else 0,
            )
            return _run_services(context, resume, signals, session)


def _run_services(
    context: RunContext, resume: ResumePoint | None, signals: StopSignals, session: RaySession
) -> _Outcome:
    from relax_core.control.services import Services

    config = context.config
    services = Services(context, resume.snapshot if resume else None)
    try:
        title = f"{config.algo.name} · {config.model.name} · {config.data.name} · {config.mode.name.value}"
        with Panel(config.run.steps, context.run_dir, title, live=config.run.panel) as panel:
            controller = Controller(context, services, panel=panel, stop_requested=signals.requested)
            try:
                end = controller.run()
            except RunFailed as failure:
                session.keep_logs()
                progress = controller.progress
                return _Outcome(
                    word="failed",
                    failure=failure,
                    records=collect(services.metrics, progress, run_dir=context.run_dir) if progress else None,
                )
        progress = services.bus.progress(timeout_s=config.bus.call_timeout_s)
        return _Outcome(
            word="stopped" if end.stopped else "finished",
            records=collect(services.metrics, progress, run_dir=context.run_dir),
        )
    finally:
        services.close(reason="the run has ended")


def _model_folder(config: RelaxConfig) -> Path:
    if config.model.path is not None:
        return Path(config.model.path)
    assert config.model.builtin is not None and config.model.task is not None, "validated"
    return tiny_model_folder(config.model.builtin, task=config.model.task)
