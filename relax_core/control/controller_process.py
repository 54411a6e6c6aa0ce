"""Runs the controller as a forked child of the supervisor: exchanges heartbeats, stop messages and the reported end."""

from __future__ import annotations

import _thread
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
from types import FrameType, TracebackType
from typing import Any, Literal, NoReturn, Self

from relax_core.contracts.child_process import end_starter
from relax_core.contracts.monitor import Check, Elapsed, Finding, Monitor
from relax_core.contracts.process_trees import PR_SET_NAME, prctl
from relax_core.contracts.stop_signals import STOP_SIGNALS

FAILED = 1
POLL_S = 0.2  # maximum delay in seconds until an end, a finding or a signal is noticed
IMMEDIATE_END_S = 5.0  # seconds that a controller may take to end immediately
ANSWER_S = 10.0  # seconds that a controller may take to report, after a stop message, whether a train step is done
CONTROLLER = "relax-control"  # process name in `ps` and `top`, at most 15 characters


@dataclass(frozen=True, kw_only=True)
class ControllerEnd:
    """Describes the end of the controller.

    ``how`` is "ended" if the controller reported its exit code ``code``, "died" if it did not, "unstarted" if its Ray
    did not start, and "stopped" if it has to be killed after a stop. ``cause`` is the reason, for the user.
    """

    how: Literal["ended", "died", "unstarted", "stopped"]
    code: int = FAILED
    cause: str = ""


class ControllerProcess:
    """Starts a child process that calls ``main`` and exits with its result.

    The stop signals are blocked in the child and in all processes that it starts. With ``has_own_ray`` all processes of
    the run are descendants of the child; a stop before the first finished train step kills them. After a stop message
    the controller reports whether a train step is done, because its last report may be a second old.
    """

    def __init__(self, main: Callable[[SupervisorPipe], int], signals: StopSignals, *, has_own_ray: bool) -> None:
        end_starter()  # ends the thread that starts sandboxes; only the checks before the start used it
        assert threading.active_count() == 1, "a fork copies the calling thread alone"
        self._signals = signals
        self._has_own_ray = has_own_ray
        self._heard = b""
        self._trained = self._untrained = False
        self._stopped_at: float | None = None  # monotonic time of the stop message
        self._killed_at: float | None = None  # monotonic deadline of an immediate end
        self._elapsed, self._silent_s, self._spoke = Elapsed(), 0.0, False
        self._last: tuple[str, str] | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self._read_from, write_to = os.pipe()
        read_from, self._write_to = os.pipe()
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._read_from)
            os.close(self._write_to)
            _be_controller(main, SupervisorPipe(write_to=write_to, read_from=read_from))
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        os.close(write_to)
        os.close(read_from)

    def check(self, *, frozen_after_s: float) -> Check:
        """Returns the check that kills a controller without a heartbeat for ``frozen_after_s`` seconds."""

        def look() -> Finding | None:
            passed_s = self._elapsed.since_last()
            self._silent_s = 0.0 if self._spoke else self._silent_s + passed_s
            self._spoke = False
            if self._silent_s <= frozen_after_s:
                return None
            return Finding(failed_part="the controller", how=f"sent no heartbeat for {self._silent_s:.0f} s")

        return Check(name="controller", every_s=0.0, look=look, act=lambda finding: os.kill(self._pid, signal.SIGKILL))

    def wait(self, monitor: Monitor) -> ControllerEnd:
        """Waits until the controller has ended, or until all processes must be killed because of a stop.

        ``monitor`` runs the supervisor's checks several times a second.
        """
        try:
            while True:
                ended, status = os.waitpid(self._pid, os.WNOHANG)
                if ended:
                    while select.select([self._read_from], [], [], 0)[0] and self._listen():
                        pass
                    return self._end(os.waitstatus_to_exitcode(status))
                monitor.tick()
                self._spoke = bool(select.select([self._read_from], [], [], POLL_S)[0])
                if self._spoke and not self._listen():
                    time.sleep(POLL_S)  # the controller closed its pipe and is exiting
                if self._signals.received is not None and (cause := self._stop(self._signals.received)):
                    return ControllerEnd(how="stopped", cause=cause)
        finally:
            os.close(self._read_from)
            os.close(self._write_to)

    def _listen(self) -> bool:
        """Reads the controller's messages. Returns False at the end of the pipe."""
        part = os.read(self._read_from, READ_BYTES)
        *lines, self._heard = (self._heard + part).split(b"\n")
        for line in filter(None, lines):
            word, _, rest = line.decode().partition(" ")
            if word == TRAINED:
                self._trained = True
            elif word == UNTRAINED:
                self._untrained = True
            else:
                self._last = word, rest
        return bool(part)

    def _stop(self, number: int) -> str:
        """Sends each stop message to the controller once. Returns why the controller must be killed, or ""."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self._send(f"{STOP} {number}")
        answered = self._untrained or time.monotonic() - self._stopped_at > ANSWER_S
        if self._has_own_ray and not self._trained and answered:
            return "stopped before a train step was done: nothing was written, and earlier checkpoints stay"
        if self._signals.again and self._killed_at is None:
            self._killed_at = time.monotonic() + IMMEDIATE_END_S
            self._send(END_NOW)
        if self._killed_at is not None and time.monotonic() > self._killed_at:
            return "ended at once, without a checkpoint"
        return ""

    def _send(self, line: str) -> None:
        with suppress(BrokenPipeError):  # the controller has just exited
            os.write(self._write_to, f"{line}\n".encode())

    def _end(self, exit_code: int) -> ControllerEnd:
        """Returns the end of the controller, from its last message or else from ``exit_code`` (-N after signal N)."""
        word, rest = self._last or ("", "")
        if word == ENDED:
            return ControllerEnd(how="ended", code=int(rest))
        if word == RAY_UNSTARTED:
            return ControllerEnd(how="unstarted", cause=rest)
        if word == LOST:
            return ControllerEnd(how="died", cause=rest)
        if exit_code < 0:
            return ControllerEnd(how="died", cause=f"the controller was killed by {signal.Signals(-exit_code).name}")
        return ControllerEnd(how="died", cause=f"the controller ended without a report, with exit code {exit_code}")


def _be_controller(main: Callable[[SupervisorPipe], int], pipe: SupervisorPipe) -> NoReturn:
    """Executes ``main`` in the forked child and exits with its result."""
    code = FAILED
    try:
        os.setpgid(0, 0)  # Ctrl-Z and Ctrl-\ in a terminal reach only the supervisor
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # the child may still write to the terminal
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # SupervisorPipe interrupts for an immediate end
        prctl(PR_SET_NAME, ctypes.c_char_p(CONTROLLER.encode()))
        pipe.start()
        code = main(pipe)
    except BaseException:
        traceback.print_exc()
    finally:
        pipe.report_ended(code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -- The controller and its supervisor exchange lines of text through two pipes ---------------------------------------

BEAT_S = 1.0
READ_BYTES = 4096
# Messages of the controller; an empty line is a heartbeat. The last three are sent before the controller exits; the
# exit code or the cause follows the message.
TRAINED, ENDED, LOST, RAY_UNSTARTED = "trained", "ended", "lost", "ray-unstarted"
UNTRAINED = "untrained"  # the controller's answer to a stop message before a train step is done
STOP, END_NOW = "stop", "at-once"  # messages of the supervisor


class SupervisorPipe:
    """Implements the controller's end of the pipes to the supervisor. Thread-safe.

    ``stop_signal`` is the number of the signal that stops the run, or None. It is SIGTERM if the supervisor has exited.
    ``ordered`` is True after `order_stop`. ``trained`` is True after `report_trained`. ``write_to`` and ``read_from``
    are file descriptors.
    """

    def __init__(self, *, write_to: int, read_from: int) -> None:
        self.stop_signal: int | None = None
        self.trained = self.ordered = False
        self._write_to, self._read_from = write_to, read_from
        self._lock = threading.Lock()
        self._ended = self._watches_steps = False

    def start(self) -> None:
        """Starts the thread that sends heartbeats and receives messages."""
        threading.Thread(target=self._exchange, name="supervisor-pipe", daemon=True).start()

    def order_stop(self) -> None:
        """Stops the run with a checkpoint, as after SIGTERM, because of an order through the gateway."""
        if self.stop_signal is None:
            self.ordered, self.stop_signal = True, signal.SIGTERM

    def stop_requested(self) -> bool:
        """Returns whether the run must stop."""
        return self.stop_signal is not None

    def report_trained(self) -> None:
        """Reports that a train step is done; from now on a stop has to write a checkpoint."""
        if not self.trained:
            self.trained = True
            self._send(TRAINED)

    def watch_steps(self) -> None:
        """Declares that the caller will answer a stop with `report_trained` or `report_untrained` from now on.

        Before this call no train step is done, so this object's thread answers a stop.
        """
        self._watches_steps = True

    def report_untrained(self) -> None:
        """Reports that no train step was done at the stop. The supervisor may then kill all processes at once."""
        self._send(UNTRAINED)

    def report_ended(self, code: int) -> None:
        """Reports the exit code, unless another end was reported before."""
        self._send_last(ENDED, str(code))

    def report_lost(self, cause: str) -> None:
        """Reports that the controller ends because of ``cause``, and that another controller can continue the run."""
        self._send_last(LOST, cause)

    def report_ray_unstarted(self, cause: str) -> None:
        """Reports that the controller ends because its Ray did not start."""
        self._send_last(RAY_UNSTARTED, cause)

    def _send_last(self, word: str, rest: str) -> None:
        if not self._ended:
            self._ended = True
            self._send(word, rest)

    def _send(self, word: str, rest: str = "") -> None:
        line = " ".join([word, *rest.split()]) + "\n"
        with self._lock, suppress(BrokenPipeError):  # the supervisor has exited
            os.write(self._write_to, line.encode())

    def _exchange(self) -> None:
        heard = b""
        while True:
            if select.select([self._read_from], [], [], BEAT_S)[0]:
                part = os.read(self._read_from, READ_BYTES)
                if not part:
                    break
                *lines, heard = (heard + part).split(b"\n")
                for line in lines:
                    self._take(line.decode())
            if select.select([], [self._write_to], [], 0)[1]:  # a supervisor that is stopped (SIGSTOP) does not read
                self._send("")
        self.stop_signal = self.stop_signal or signal.SIGTERM  # without a supervisor the run ends with a checkpoint

    def _take(self, line: str) -> None:
        word, _, number = line.partition(" ")
        if word == STOP:
            self.stop_signal = int(number)
            if not self._watches_steps:
                self._send(UNTRAINED)
        else:
            assert word == END_NOW, line
            _thread.interrupt_main()  # raises KeyboardInterrupt in the main thread


# -- Stop signals of the supervisor: the first requests an orderly end, a later signal an immediate end ----------------

AGAIN_S = 1.0  # a service manager may send several signals for one stop


class StopSignals:
    """Handles the stop signals while it is used as a context manager in the main thread.

    ``received`` is the number of the first signal. ``again`` is True if another signal came more than a second later.
    If SIGHUP was ignored before, for example by nohup, it stays ignored.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.again = False
        self._received_at = 0.0
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._earlier[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """Returns the exit code of a run that the signals ended."""
        assert self.received is not None
        return 128 + self.received

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at > AGAIN_S:
            self.again = True
