"""A controller as its supervisor sees it: a forked child that gives signs of life, and says how it ends."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NoReturn

from relax_core.contracts.stop_signals import STOP_SIGNALS
from relax_core.control.host.process_trees import LONGEST_GAP_S
from relax_core.control.host.subreaper import PR_SET_NAME, prctl
from relax_core.control.supervision.signals import StopSignals
from relax_core.control.supervision.supervisor_pipe import (
    AT_ONCE,
    ENDED,
    RAY_LOST,
    RAY_UNSTARTED,
    READ_BYTES,
    STOP,
    TRAINED,
    SupervisorPipe,
)

FAILED = 1
LOOK_S = 0.2  # how late an end, a freeze or a signal is noticed
AT_ONCE_S = 5.0  # a controller that was told to end at once has so long for it
CONTROLLER = "relax-control"  # its name in `ps` and `top`; 15 characters at most


@dataclass(frozen=True, kw_only=True)
class ControllerEnd:
    """``how``: it "ended" with exit code ``code``, as it said itself; or it "died"; or its Ray was "unstarted"; or it
    was "stopped" and still runs. ``words``: the cause, or what is told of a stop."""

    how: Literal["ended", "died", "unstarted", "stopped"]
    code: int = FAILED
    words: str = ""


class ControllerProcess:
    """A child that runs ``main``, whose result is its exit code. All stop signals are blocked in it, and in all that it
    starts.

    ``has_own_ray``: whatever the controller starts is below it, so that a kill of the whole tree ends a run that has
    done no train step.
    """

    def __init__(self, main: Callable[[SupervisorPipe], int], signals: StopSignals, *, has_own_ray: bool) -> None:
        assert threading.active_count() == 1, "a fork copies the calling thread alone"
        self._signals = signals
        self._has_own_ray = has_own_ray
        self._heard = b""
        self._trained = self._told_stop = False
        self._killed_at: float | None = None  # on the monotonic clock: when an end at once is no longer waited for
        self._last: tuple[str, str] | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self._hear, tell = os.pipe()
        hear, self._tell = os.pipe()
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._hear)
            os.close(self._tell)
            _be_controller(main, SupervisorPipe(tell=tell, hear=hear))
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        os.close(tell)
        os.close(hear)

    def wait(self, *, frozen_after_s: float) -> ControllerEnd:
        """Returns when it has ended, or when a stop wants everything to end now. One that gives no sign of life for
        ``frozen_after_s`` seconds is killed."""
        looked, silent_s = time.monotonic(), 0.0
        try:
            while True:
                ended, status = os.waitpid(self._pid, os.WNOHANG)
                if ended:
                    while select.select([self._hear], [], [], 0)[0] and self._listen():
                        pass
                    return self._end(os.waitstatus_to_exitcode(status))
                spoke = bool(select.select([self._hear], [], [], LOOK_S)[0])
                now = time.monotonic()
                looked, silent_s = now, 0.0 if spoke else silent_s + min(now - looked, LONGEST_GAP_S)
                if spoke and not self._listen():
                    time.sleep(LOOK_S)  # its end is closed: it is ending
                elif silent_s > frozen_after_s:
                    os.kill(self._pid, signal.SIGKILL)
                if self._signals.received is not None and (words := self._stop(self._signals.received)):
                    return ControllerEnd(how="stopped", words=words)
        finally:
            os.close(self._hear)
            os.close(self._tell)

    def _listen(self) -> bool:
        """Takes what it said; False at the end of its pipe."""
        part = os.read(self._hear, READ_BYTES)
        *lines, self._heard = (self._heard + part).split(b"\n")
        for line in filter(None, lines):
            word, _, rest = line.decode().partition(" ")
            if word == TRAINED:
                self._trained = True
            else:
                self._last = word, rest
        return bool(part)

    def _stop(self, number: int) -> str:
        """Hands a stop on, each order once. Returns words where nothing is waited for any more."""
        if not self._told_stop:
            if self._has_own_ray and not self._trained:
                return "stopped before a train step was done: nothing was written, and earlier checkpoints stay"
            self._told_stop = True
            self._order(f"{STOP} {number}")
        if self._signals.again and self._killed_at is None:
            self._killed_at = time.monotonic() + AT_ONCE_S
            self._order(AT_ONCE)
        if self._killed_at is not None and time.monotonic() > self._killed_at:
            return "ended at once, without a checkpoint"
        return ""

    def _order(self, line: str) -> None:
        with suppress(BrokenPipeError):  # it has just ended
            os.write(self._tell, f"{line}\n".encode())

    def _end(self, exit_code: int) -> ControllerEnd:
        """``exit_code``: the negative number of a signal where one killed it. Its own last word goes before it."""
        word, rest = self._last or ("", "")
        if word == ENDED:
            return ControllerEnd(how="ended", code=int(rest))
        if word == RAY_UNSTARTED:
            return ControllerEnd(how="unstarted", words=rest)
        if word == RAY_LOST:
            return ControllerEnd(how="died", words=f"{rest}, and the controller with it")
        if exit_code < 0:
            return ControllerEnd(how="died", words=f"the controller was killed by {signal.Signals(-exit_code).name}")
        return ControllerEnd(how="died", words=f"the controller ended without a word, with exit code {exit_code}")


def _be_controller(main: Callable[[SupervisorPipe], int], pipe: SupervisorPipe) -> NoReturn:
    """The child's life."""
    code = FAILED
    try:
        os.setpgid(0, 0)  # Ctrl-Z and Ctrl-\ in a terminal are the supervisor's alone
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # so that it may write to that terminal all the same
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # for an end at once, which the pipe brings
        prctl(PR_SET_NAME, ctypes.c_char_p(CONTROLLER.encode()))
        pipe.start()
        code = main(pipe)
    except BaseException:
        traceback.print_exc()
    finally:
        pipe.say_ended(code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
