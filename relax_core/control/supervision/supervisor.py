"""The process that the user started: above the controller, so that a controller's death is not the run's.

It forks the controller, tells it of a stop, and knows each process that the run leaves, as all orphans become its
children. A controller that died, froze or lost its Ray starts again from the newest checkpoint, with a new Ray. The
supervisor never imports Ray.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from relax_core.config.schema import RelaxConfig
from relax_core.control.host.run_paths import RunPaths, run_paths
from relax_core.control.host.stale_runs import remove_stale_runs
from relax_core.control.host.subreaper import become_subreaper, end_children
from relax_core.control.run.recovery_log import FROM_CHECKPOINT, Recoveries, recoveries_file
from relax_core.control.run.resume import ResumePoint, find_resume_point
from relax_core.control.supervision.controller_process import FAILED, ControllerProcess
from relax_core.control.supervision.signals import StopSignals
from relax_core.control.supervision.supervisor_pipe import SupervisorPipe
from relax_core.observe.terminal.standard_streams import RUN_PATIENCE_S, unread_streams

RAY_STARTS = 3  # times that Ray is started before the run fails of it
SHOW_CURSOR = "\x1b[?25h"  # a panel hides it

RunOnce = Callable[[RelaxConfig, ResumePoint | None, RunPaths, "Attempt", SupervisorPipe], int]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """``number``: 0, or how many controllers died before. ``started``: Unix time at which the user's process began, or
    a sweep's turn came. ``causes``: how the earlier controllers ended, one line each."""

    number: int
    started: float
    causes: tuple[str, ...] = ()


def supervise(config: RelaxConfig, resume: ResumePoint | None, run_once: RunOnce) -> int:
    """Runs ``run_once`` in a child until it ends by itself; returns its exit code. One that died is repeated from the
    newest checkpoint, as long as all recoveries of the run are at most ``run.max_recoveries``; then the code is 1. A
    stop by signal N before a train step is done ends it at once, with 128 + N. Nothing of the run is left afterwards,
    and what earlier ones left, killed with their supervisors, is removed first."""
    with unread_streams(patience_s=RUN_PATIENCE_S):
        _remove_stale_runs()
        become_subreaper()
        recoveries_file(Path(config.run.dir)).unlink(missing_ok=True)  # of an earlier command
        with StopSignals() as signals:
            return _supervise(config, resume, run_once, signals)


def _supervise(config: RelaxConfig, resume: ResumePoint | None, run_once: RunOnce, signals: StopSignals) -> int:
    attempt = Attempt(number=0, started=next(_STARTS)())
    ray_starts = 0
    while True:
        with run_paths(run_dir=Path(config.run.dir), shared=_is_shared(config)) as place:
            main = partial(run_once, config, resume, place, attempt)
            controller = ControllerProcess(main, signals, has_own_ray=config.launcher.ray_address is None)
            end = controller.wait(frozen_after_s=config.run.heartbeat_timeout_s)
            _end_rest()
        if end.how == "ended":
            return end.code
        if sys.stdout.isatty():
            print(SHOW_CURSOR, end="")
        if end.how == "stopped":
            _tell(end.words)
            return signals.exit_code
        if signals.received is not None:
            _tell(f"{end.words}, while the run was being stopped; the newest checkpoint is what is kept")
            return signals.exit_code
        if end.how == "unstarted":
            ray_starts += 1
            if ray_starts == RAY_STARTS:
                _tell(f"failed: {end.words}")
                return FAILED
            _tell(f"{end.words} Ray is started again, {ray_starts + 1} of {RAY_STARTS} times.")
            continue
        if _recoveries_done(config, attempt) >= config.run.max_recoveries:
            _tell(f"failed: {end.words}; run.max_recoveries={config.run.max_recoveries}")
            return FAILED
        ray_starts = 0
        attempt = replace(attempt, number=attempt.number + 1, causes=(*attempt.causes, end.words))
        try:
            resume = find_resume_point(replace(config, resume="auto")) or resume
        except ValueError as error:
            _tell(f"failed: {end.words}, and its newest checkpoint is of no use: {error}")
            return FAILED
        for left in resume.left if resume is not None else ():
            _tell(f"resume: {left}")
        _tell(f"{end.words}; another goes on from step {resume.step if resume is not None else 0}")


def _tell(words: str) -> None:
    print(f"relax: {words}", file=sys.stderr, flush=True)


def _remove_stale_runs() -> None:
    """Says what it was; what cannot be removed is said too, and keeps no run from starting."""
    try:
        for stale_run in remove_stale_runs():
            _tell(f"removed {stale_run}")
    except (OSError, RuntimeError) as error:
        _tell(f"what a killed run left cannot be removed: {error}")


def _end_rest() -> None:
    """Whatever had to end well has ended: the rest is killed."""
    try:
        end_children()
    except RuntimeError as error:
        _tell(str(error))


def _recoveries_done(config: RelaxConfig, attempt: Attempt) -> int:
    """How often all services have started again: the controllers keep a book, but one that died early wrote nothing."""
    book = Recoveries(recoveries_file(Path(config.run.dir)), tell=_tell)
    book.take_up()
    return max(attempt.number, book.count(FROM_CHECKPOINT))


def _is_shared(config: RelaxConfig) -> bool:
    """A cluster that was joined may have several nodes, and engines that were attached be on others: what all share is
    the run's own folder."""
    return config.launcher.ray_address is not None or bool(config.engine.urls)


def _process_start() -> float:
    """Unix time at which this process began."""
    import psutil

    return float(psutil.Process(os.getpid()).create_time())


# A run's clock starts with its process; that of a sweep's later runs, which share it, when their turn comes.
_STARTS: Any = itertools.chain([_process_start], itertools.repeat(time.time))
