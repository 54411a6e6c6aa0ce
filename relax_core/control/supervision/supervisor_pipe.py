"""What a controller and its supervisor tell each other: lines of text, through a pipe each way.

The controller says that it lives, that a train step is done, and how it ends. One that ends without a word has died,
whatever its exit code. From its supervisor it hears that the run is to stop; it takes no signals itself.
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
# The controller's words; an empty line is a sign of life. The last three are last words, and the rest of the line is
# the exit code or the cause.
TRAINED, ENDED, RAY_LOST, RAY_UNSTARTED = "trained", "ended", "ray-lost", "ray-unstarted"
STOP, AT_ONCE = "stop", "at-once"  # the supervisor's


class SupervisorPipe:
    """The controller's side. ``stop_signal``: the number of the signal that stops the run, once the supervisor has said
    so; SIGTERM where the supervisor is gone. May be used from any thread."""

    def __init__(self, *, tell: int, hear: int) -> None:
        self.stop_signal: int | None = None
        self._tell, self._hear = tell, hear
        self._lock = threading.Lock()
        self._trained = self._ended = False

    def start(self) -> None:
        """From now on a thread gives signs of life and listens."""
        threading.Thread(target=self._live, name="supervisor-pipe", daemon=True).start()

    def stop_requested(self) -> bool:
        return self.stop_signal is not None

    def say_trained(self) -> None:
        """A train step is done: from now on a stop has something to keep."""
        if not self._trained:
            self._trained = True
            self._say(TRAINED)

    def say_ended(self, code: int) -> None:
        """The controller's last word, unless it had one before."""
        self._say_last(ENDED, str(code))

    def say_ray_lost(self, cause: str) -> None:
        """The controller ends for it lost its Ray: a new one is needed."""
        self._say_last(RAY_LOST, cause)

    def say_ray_unstarted(self, cause: str) -> None:
        """The controller ends for its Ray did not start."""
        self._say_last(RAY_UNSTARTED, cause)

    def _say_last(self, word: str, rest: str) -> None:
        if not self._ended:
            self._ended = True
            self._say(word, rest)

    def _say(self, word: str, rest: str = "") -> None:
        line = " ".join([word, *rest.split()]) + "\n"
        with self._lock, suppress(BrokenPipeError):  # the supervisor is gone
            os.write(self._tell, line.encode())

    def _live(self) -> None:
        heard = b""
        while True:
            if select.select([self._hear], [], [], BEAT_S)[0]:
                part = os.read(self._hear, READ_BYTES)
                if not part:
                    break
                *lines, heard = (heard + part).split(b"\n")
                for line in lines:
                    self._take(line.decode())
            if select.select([], [self._tell], [], 0)[1]:  # a supervisor that is stopped reads nothing
                self._say("")
        self.stop_signal = self.stop_signal or signal.SIGTERM  # without a supervisor the run ends with a checkpoint

    def _take(self, line: str) -> None:
        word, _, number = line.partition(" ")
        if word == STOP:
            self.stop_signal = int(number)
        else:
            assert word == AT_ONCE, line
            _thread.interrupt_main()  # raises KeyboardInterrupt there
