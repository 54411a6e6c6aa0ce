"""SIGINT and SIGTERM end a run with a checkpoint; another one, a second later or more, ends it at once."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_S = 1.0  # what stops a whole tree of processes sends each its own signal, and our supervisor hands its on


class StopSignals:
    """Use as a context manager in the main thread. ``received``: the first signal's number."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._received_at = 0.0
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._earlier = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        self.arm()
        return self

    def arm(self) -> None:
        """Takes the signals; again after ray.init, whose own SIGTERM handler ends the process without a checkpoint."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._take)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        return self.received is not None

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at > AGAIN_S:
            raise KeyboardInterrupt
