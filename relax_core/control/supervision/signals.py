"""The stop signals as the supervisor hears them: the first one asks for an orderly end, a later one for an end now."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

from relax_core.contracts.stop_signals import STOP_SIGNALS

AGAIN_S = 1.0  # who stops a service may send it several signals for one stop


class StopSignals:
    """Use as a context manager in the main thread. ``received``: the first signal's number. ``again``: another one came
    a second later or more. SIGHUP stays ignored where it was, as under nohup."""

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
        """Of a run that they ended."""
        assert self.received is not None
        return 128 + self.received

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at > AGAIN_S:
            self.again = True
