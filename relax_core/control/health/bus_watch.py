"""Polls the bus from a thread of its own, so that a bus that hangs does not block the controller."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from relax_core.bus.ray_bus import ANSWER_GRACE_S, PROCESS_EXITED, RayBus
from relax_core.contracts.bus import BusLost, BusProgress, BusTimeout

ASK_S = 0.25


class BusWatch:
    """Polls the bus while it is used as a context manager.

    ``progress`` is the newest answer, None before the first. ``lost`` says how the bus was lost, as a clause that
    follows "the bus"; it is None while the bus answers.
    """

    def __init__(self, bus: RayBus, *, heartbeat_timeout_s: float) -> None:
        self.progress: BusProgress | None = None
        self.lost: str | None = None
        self._bus = bus
        # The bus answers this call at once, so the client's extra wait is part of the deadline.
        self._call_timeout_s = max(0.0, heartbeat_timeout_s - ANSWER_GRACE_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bus-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()  # the thread is not joined, because its last call may wait for its deadline

    def _watch(self) -> None:
        while not self._ended.wait(ASK_S):
            try:
                self.progress = self._bus.progress(timeout_s=self._call_timeout_s)
            except BusLost as error:
                # If another process was lost, such as a storage unit, the error names it.
                self.lost = "died" if str(error).startswith(PROCESS_EXITED) else f"was lost: {error}"
                return
            except BusTimeout as error:
                self.lost = f"froze: {error}"
                return
