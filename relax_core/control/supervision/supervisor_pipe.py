"""The controller and its supervisor exchange lines of text through two pipes.

The controller sends heartbeats, reports that a train step is done, and reports how it ends. If it exits without such a
report, it has died, whatever its exit code is. The supervisor sends stop messages, because the controller handles no
signals itself.
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import threading
from contextlib import suppress

BEAT_S = 1.0
READ_BYTES = 4096
# Messages of the controller; an empty line is a heartbeat. The last three are sent before it exits, and the rest of
# their line is the exit code or the cause.
TRAINED, ENDED, RAY_LOST, RAY_UNSTARTED = "trained", "ended", "ray-lost", "ray-unstarted"
UNTRAINED = "untrained"  # the answer of the controller to a stop message before a train step is done
STOP, AT_ONCE = "stop", "at-once"  # messages of the supervisor


class SupervisorPipe:
    """Is the controller's side of the pipes.

    It may be used from any thread. ``stop_signal`` is the number of the signal that stops the run, or None. It is
    SIGTERM if the supervisor has exited. ``ordered`` is True after `order_stop`, ``trained`` after `report_trained`.
    ``write_to`` and ``read_from`` are file descriptors.
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
        """Stops the run with a checkpoint, as SIGTERM does, because an order from outside says so."""
        if self.stop_signal is None:
            self.ordered, self.stop_signal = True, signal.SIGTERM

    def stop_requested(self) -> bool:
        """Is True once the run shall stop."""
        return self.stop_signal is not None

    def report_trained(self) -> None:
        """Reports that a train step is done, so that a stop has to write a checkpoint."""
        if not self.trained:
            self.trained = True
            self._send(TRAINED)

    def watch_steps(self) -> None:
        """Says that the caller looks for train steps from now on, and answers a stop by one of the two reports.

        Before this call no train step is done, so the thread answers the stop itself.
        """
        self._watches_steps = True

    def report_untrained(self) -> None:
        """Reports that no train step was done when the stop came, so that the supervisor may end everything at once."""
        self._send(UNTRAINED)

    def report_ended(self, code: int) -> None:
        """Reports the exit code, unless another end was reported before."""
        self._send_last(ENDED, str(code))

    def report_ray_lost(self, cause: str) -> None:
        """Reports that the controller ends because it lost its Ray, so that a new Ray is needed."""
        self._send_last(RAY_LOST, cause)

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
            if select.select([], [self._write_to], [], 0)[1]:  # a supervisor that is stopped reads nothing
                self._send("")
        self.stop_signal = self.stop_signal or signal.SIGTERM  # without a supervisor the run ends with a checkpoint

    def _take(self, line: str) -> None:
        word, _, number = line.partition(" ")
        if word == STOP:
            self.stop_signal = int(number)
            if not self._watches_steps:
                self._send(UNTRAINED)
        else:
            assert word == AT_ONCE, line
            _thread.interrupt_main()  # raises KeyboardInterrupt in the main thread
