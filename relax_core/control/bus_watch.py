"""Keeps an eye on the bus from a thread of its own, so that a bus that hangs holds up nobody."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from relax_core.bus.ray_backend import RayBus
from relax_core.contracts.bus import BusLost, BusProgress, BusTimeout

ASK_S = 0.25


class BusWatch:
    """Use as a context manager. ``progress``: the newest that the bus told, None before the first. ``lost``: how the
    bus was lost, in words that follow "the bus"; None while it answers."""

    def __init__(self, bus: RayBus, *, heartbeat_timeout_s: float) -> None:
        self.progress: BusProgress | None = None
        self.lost: str | None = None
        self._bus = bus
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bus-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()  # not joined: it may be asking a bus that never answers; its call has a deadline

    def _watch(self) -> None:
        while not self._ended.wait(ASK_S):
            try:
                self.progress = self._bus.progress(timeout_s=self._heartbeat_timeout_s)
            except BusLost:
                self.lost = "died"
                return
            except BusTimeout as error:
                self.lost = f"froze: {error}"
                return
