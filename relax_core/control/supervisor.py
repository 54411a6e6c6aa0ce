"""The process that the user started: above the controller, so that a controller's death is not the run's.

It forks the controller, hands signals on, and knows each process that the run leaves: all orphans become its children.
A controller that was killed, or that froze, starts again from the newest checkpoint. It never imports Ray.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from relax_core.config.schema import RelaxConfig
from relax_core.control.leftovers import remove_leftovers
from relax_core.control.orphans import PR_SET_NAME, PR_SET_PDEATHSIG, adopt_orphans, end_children, prctl
from relax_core.control.place import RunPlace, run_place
from relax_core.control.resume import ResumePoint, find_resume_point
from relax_core.control.signals import STOP_SIGNALS

FAILED = 1
BEAT_S = 1.0
LOOK_S = 0.2  # how late an end, a freeze or a signal is noticed
LONGEST_GAP_S = 3.0  # between two looks; more was this process's own pause, and is held against nobody
ORPHANS_S = 10.0  # Ray's daemons get their SIGTERM a moment before the controller ends
CONTROLLER = "relax-control"  # its name in `ps` and `top`; 15 characters at most

RunOnce = Callable[[RelaxConfig, ResumePoint | None, RunPlace, "Attempt"], int]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """``number``: 0, or how many controllers died before. ``started``: Unix time at which the user's process began, or
    a sweep's turn came. ``causes``: how the earlier controllers ended, one line each."""

    number: int
    started: float
    causes: tuple[str, ...] = ()


def supervise(config: RelaxConfig, resume: ResumePoint | None, run_once: RunOnce) -> int:
    """Runs ``run_once`` in a child until it ends by itself; returns its exit code. A killed one is repeated from the
    newest checkpoint, ``run.max_recoveries`` times; then the code is 1. Nothing of the run is left afterwards, and what
    earlier ones left, killed with their supervisors, is removed first."""
    _remove_leftovers()
    adopt_orphans()
    attempt = Attempt(number=0, started=next(_STARTS)())
    with _Signals() as signals:
        while True:
            with run_place(run_dir=Path(config.run.dir), shared=_is_shared(config)) as place:
                controller = _Controller(partial(run_once, config, resume, place, attempt), signals)
                code = controller.wait(frozen_after_s=config.run.heartbeat_timeout_s)
                signals.controller = None
                _end_rest(grace_s=ORPHANS_S if code >= 0 else 0.0)  # the killed one's have nothing to end well
            if code >= 0:
                return code
            if signals.received is not None:
                return 128 + signals.received
            how = f"the controller was killed by {signal.Signals(-code).name}"
            if attempt.number >= config.run.max_recoveries:
                print(f"relax: failed: {how}; run.max_recoveries={config.run.max_recoveries}", file=sys.stderr)
                return FAILED
            attempt = replace(attempt, number=attempt.number + 1, causes=(*attempt.causes, how))
            try:
                resume = find_resume_point(replace(config, resume="auto")) or resume
            except ValueError as error:
                print(f"relax: failed: {how}, and its newest checkpoint is of no use: {error}", file=sys.stderr)
                return FAILED
            for left in resume.left if resume is not None else ():
                print(f"relax: resume: {left}", file=sys.stderr)
            step = resume.step if resume is not None else 0
            print(f"relax: {how}; another goes on from step {step}", file=sys.stderr, flush=True)


def _remove_leftovers() -> None:
    """Says what it was; what cannot be removed is said too, and keeps no run from starting."""
    try:
        for leftover in remove_leftovers():
            print(f"relax: removed {leftover}", file=sys.stderr, flush=True)
    except (OSError, RuntimeError) as error:
        print(f"relax: what a killed run left cannot be removed: {error}", file=sys.stderr, flush=True)


def _end_rest(*, grace_s: float) -> None:
    try:
        end_children(grace_s=grace_s)
    except RuntimeError as error:
        print(f"relax: {error}", file=sys.stderr)


def _is_shared(config: RelaxConfig) -> bool:
    """A cluster that was joined may have several nodes, and engines that were attached be on others: what all share is
    the run's own folder."""
    return config.launcher.ray_address is not None or bool(config.engine.urls)


class _Signals:
    """Hands SIGINT and SIGTERM on to the controller, each once. ``received``: the first one's number."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.controller: int | None = None  # process id
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._earlier = {number: signal.signal(number, self._take) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if self.controller is not None:
            os.kill(self.controller, number)


class _Controller:
    """A forked child. It writes a byte to a pipe each second while its interpreter runs."""

    def __init__(self, main: Callable[[], int], signals: _Signals) -> None:
        assert threading.active_count() == 1, "a fork copies the calling thread alone"
        sys.stdout.flush()
        sys.stderr.flush()
        self._beats, beats = os.pipe()
        parent = os.getpid()
        # Blocked, so that a signal meets a child that has its own handlers, and a parent that knows its child.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._beats)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            _as_controller(main, beats, parent)
        signals.controller = self._pid
        if signals.received is not None:  # while there was none
            os.kill(self._pid, signals.received)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        os.close(beats)

    def wait(self, *, frozen_after_s: float) -> int:
        """The exit code, or the negative number of the signal that killed it."""
        looked, silent_s = time.monotonic(), 0.0
        while True:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                os.close(self._beats)
                return os.waitstatus_to_exitcode(status)
            beats = select.select([self._beats], [], [], LOOK_S)[0]
            now = time.monotonic()
            looked, silent_s = now, 0.0 if beats else silent_s + min(now - looked, LONGEST_GAP_S)
            if beats and not os.read(self._beats, 4096):
                time.sleep(LOOK_S)  # its end is closed: it is ending
            elif silent_s > frozen_after_s:
                os.kill(self._pid, signal.SIGKILL)


def _as_controller(main: Callable[[], int], beats: int, parent: int) -> None:
    """The child's life; never returns."""
    code = FAILED
    try:
        os.setpgid(0, 0)  # a terminal's Ctrl-C goes to the supervisor alone, which hands it on once
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # without a supervisor it ends with a checkpoint
        prctl(PR_SET_NAME, ctypes.c_char_p(CONTROLLER.encode()))
        if os.getppid() != parent:
            os._exit(FAILED)
        threading.Thread(target=_beat, args=(beats,), name="heartbeat", daemon=True).start()
        code = main()
    except SystemExit:  # of Ray's own SIGTERM handler, which stands for a moment while Ray starts
        code = 128 + signal.SIGTERM
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _beat(beats: int) -> None:
    with suppress(BrokenPipeError):
        while True:
            os.write(beats, b".")
            time.sleep(BEAT_S)


def _process_start() -> float:
    """Unix time at which this process began."""
    import psutil

    return float(psutil.Process(os.getpid()).create_time())


# A run's clock starts with its process; that of a sweep's later runs, which share it, when their turn comes.
_STARTS: Any = itertools.chain([_process_start], itertools.repeat(time.time))
