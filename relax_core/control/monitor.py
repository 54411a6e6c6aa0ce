"""Watches the daemons of a run's own Ray.

Without its GCS or its raylet, no process of the run can start or recover.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import psutil

from relax_core.contracts.process_trees import EXITED, LONGEST_GAP_S, process_state

POLL_S = 0.25


class RayWatch:
    """Checks the daemons from a thread of its own while it is used as a context manager.

    It calls ``lost`` once, in that thread, with the cause if a daemon has exited or was stopped for ``frozen_after_s``
    seconds, because the main thread may then wait for Ray without end.
    """

    def __init__(self, daemons: Mapping[str, int], *, frozen_after_s: float, lost: Callable[[str], None]) -> None:
        """Takes the daemons as name → process id."""
        self._daemons = daemons
        self._frozen_after_s = frozen_after_s
        self._lost = lost
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(LONGEST_GAP_S)  # the session then ends Ray, which is not a loss

    def _watch(self) -> None:
        checked = time.monotonic()
        stopped_s = dict.fromkeys(self._daemons, 0.0)
        while not self._ended.wait(POLL_S):
            now = time.monotonic()
            checked, passed = now, min(now - checked, LONGEST_GAP_S)
            for name, pid in self._daemons.items():
                state = process_state(pid)
                stopped_s[name] = stopped_s[name] + passed if state == psutil.STATUS_STOPPED else 0.0
                if state in EXITED:
                    self._lost(f"Ray's {name} died")
                    return
                if stopped_s[name] > self._frozen_after_s:
                    self._lost(f"Ray's {name} froze (it was stopped for {stopped_s[name]:.0f} s)")
                    return
