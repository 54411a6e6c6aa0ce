"""The supervisor is the process that the user starts. It forks the controller, and restarts a dead controller.

The supervisor forwards stop signals to the controller. If the controller dies, freezes or loses its Ray, the supervisor
starts a new controller, which continues from the newest checkpoint with a new Ray. The supervisor is a subreaper, so it
can kill every remaining process of the run. It never imports Ray.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.child_process import module_command
from relax_core.contracts.monitor import Monitor
from relax_core.contracts.process_trees import become_subreaper, end_children
from relax_core.control.controller_process import FAILED, ControllerProcess, StopSignals, SupervisorPipe
from relax_core.control.gateway_process import GatewayProcess, GatewayUnstarted, gateway
from relax_core.control.host.run_paths import RunPaths, remove_left_weights, remove_stale_runs, run_paths
from relax_core.control.recoveries import FROM_CHECKPOINT, Recoveries, recoveries_file
from relax_core.control.resume import ResumePoint, find_resume_point
from relax_core.control.run_alarms import TITLES
from relax_core.control.stopped_processes import StoppedProcesses
from relax_core.observe.alarms import clean
from relax_core.observe.standard_streams import RUN_TIMEOUT_S, unread_streams, write_as_it_is

NOTIFY_S = 60.0  # timeout in seconds of the process that sends a notification
RAY_STARTS = 3  # number of failed starts of Ray after which the run fails
SHOW_CURSOR = "\x1b[?25h"  # a live panel hides the cursor

RunOnce = Callable[[RelaxConfig, ResumePoint | None, RunPaths, "Attempt", SupervisorPipe], int]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Describes one controller of a run.

    ``number`` is the number of earlier controllers, which died. ``started`` is the Unix time when the user's process
    began; in a sweep, when this run began. ``causes`` has one line for each earlier controller with the cause of its
    end. ``gateway`` is the socket for the gateway's requests, None without a gateway.
    """

    number: int
    started: float
    causes: tuple[str, ...] = ()
    gateway: socket.socket | None = None


def supervise(config: RelaxConfig, resume: ResumePoint | None, run_once: RunOnce) -> int:
    """Executes ``run_once`` in a child process until it ends by itself. Returns the child's exit code.

    If the child dies, a new child continues from the newest checkpoint, at most ``run.max_recoveries`` times; after
    that the exit code is 1. If signal N arrives before a train step is done, the run ends at once with exit code 128 +
    N. Stale runs are removed first. At the end, no process and no temporary folder of the run remains.
    """
    with unread_streams(timeout_s=RUN_TIMEOUT_S):
        _remove_stale_runs()
        remove_left_weights(Path(config.run.dir))
        become_subreaper()
        recoveries_file(Path(config.run.dir)).unlink(missing_ok=True)  # an earlier command wrote this file
        try:
            with StopSignals() as signals, gateway(config) as gateway_process:
                return _supervise(config, resume, run_once, signals, gateway_process)
        except GatewayUnstarted as error:
            return _failed(config, f"{error}")


def _supervise(
    config: RelaxConfig,
    resume: ResumePoint | None,
    run_once: RunOnce,
    signals: StopSignals,
    gateway_process: GatewayProcess | None,
) -> int:
    asked = None if gateway_process is None else gateway_process.controller_end
    attempt = Attempt(number=0, started=next(_STARTS)(), gateway=asked)
    ray_starts = 0
    stopped = StoppedProcesses(os.getpid(), frozen_after_s=config.run.heartbeat_timeout_s, report=_report)
    while True:
        with run_paths(run_dir=Path(config.run.dir), shared=_is_shared(config)) as paths:
            main = partial(run_once, config, resume, paths, attempt)
            controller = ControllerProcess(main, signals, has_own_ray=config.launcher.ray_address is None)
            checks = [controller.check(frozen_after_s=config.run.heartbeat_timeout_s), stopped.check()]
            if gateway_process is not None:
                checks.append(gateway_process.check())
            try:
                end = controller.wait(Monitor(checks))
            finally:
                _end_rest(gateway_process)
        if end.how == "ended":
            return end.code
        if sys.stdout.isatty():
            write_as_it_is(SHOW_CURSOR)
        if end.how == "stopped":
            return _stopped(config, end.cause, signals)
        if signals.received is not None:
            return _stopped(
                config, f"{end.cause}, while the run was being stopped; the newest checkpoint is kept", signals
            )
        if end.how == "unstarted":
            ray_starts += 1
            if ray_starts == RAY_STARTS:
                return _failed(config, end.cause)
            _report(f"{end.cause} Ray is started again, {ray_starts + 1} of {RAY_STARTS} times.")
            continue
        if _recoveries_done(config, attempt) >= config.run.max_recoveries:
            return _failed(config, f"{end.cause}; run.max_recoveries={config.run.max_recoveries}")
        ray_starts = 0
        attempt = replace(attempt, number=attempt.number + 1, causes=(*attempt.causes, end.cause))
        try:
            resume = find_resume_point(replace(config, resume="auto")) or resume
        except ValueError as error:
            return _failed(config, f"{end.cause}, and its newest checkpoint cannot be resumed: {error}")
        for line in resume.left if resume is not None else ():
            _report(f"resume: {line}")
        _report(f"{end.cause}; another goes on from step {resume.step if resume is not None else 0}")


def _failed(config: RelaxConfig, cause: str) -> int:
    """Reports a failure that no controller can report, and returns the exit code."""
    _report(f"failed: {cause}")
    _notify(config, "failed", cause)
    return FAILED


def _stopped(config: RelaxConfig, cause: str, signals: StopSignals) -> int:
    """Reports a stop that no controller can report, and returns the exit code."""
    _report(cause)
    _notify(config, "stopped", cause)
    return signals.exit_code


def _notify(config: RelaxConfig, event: str, cause: str) -> None:
    """Sends a notification in a separate process, which is killed after `NOTIFY_S` seconds."""
    if config.notify.urls_file is None or event not in config.notify.events:
        return
    title = f"{config.name}: {TITLES[event]}"
    text = f"{clean(cause)}\n{Path(config.run.dir).resolve()}"
    command = module_command("relax_core.observe.alarms", config.notify.urls_file, title, text)
    try:
        subprocess.run(command, timeout=NOTIFY_S, check=False)
    except subprocess.TimeoutExpired:
        _report(f"notify: {title!r} was not delivered within {NOTIFY_S:g} s")


def _report(line: str) -> None:
    print(f"relax: {line}", file=sys.stderr, flush=True)


def _remove_stale_runs() -> None:
    """Removes stale runs and reports them. Also reports a stale run that cannot be removed."""
    try:
        for stale_run in remove_stale_runs():
            _report(stale_run.removal())
    except (OSError, RuntimeError) as error:
        _report(f"a stale run cannot be removed: {error}")


def _end_rest(gateway_process: GatewayProcess | None) -> None:
    """Kills the remaining processes except the gateway. All processes with an orderly end have exited before."""
    try:
        end_children(spare=None if gateway_process is None else gateway_process.pid)
    except RuntimeError as error:
        _report(str(error))


def _recoveries_done(config: RelaxConfig, attempt: Attempt) -> int:
    """Returns the number of restarts of all services.

    A controller that died early may not have recorded its restart.
    """
    recoveries = Recoveries(recoveries_file(Path(config.run.dir)), report=_report)
    recoveries.load()
    return max(attempt.number, recoveries.count(FROM_CHECKPOINT))


def _is_shared(config: RelaxConfig) -> bool:
    """Returns whether the run may use other machines, which share only run.dir with this machine."""
    return config.launcher.ray_address is not None or bool(config.engine.urls)


def _process_start() -> float:
    """Returns the Unix time at which this process began."""
    import psutil

    return float(psutil.Process(os.getpid()).create_time())


# In a sweep, the first run's time is counted from the start of this process, a later run's time from the run's start.
_STARTS: Any = itertools.chain([_process_start], itertools.repeat(time.time))
