"""Records the stop signals of the supervisor: the first one asks for an orderly end, a later one for an end at once."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

from relax_core.contracts.stop_signals import STOP_SIGNALS

AGAIN_S = 1.0  # a service manager may send several signals for one stop


class StopSignals:
    """Handles the stop signals while it is used as a context manager in the main thread.

    ``received`` is the number of the first signal. ``again`` is True if another one came more than a second later. If
    SIGHUP was ignored before, as under nohup, it stays ignored.
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
