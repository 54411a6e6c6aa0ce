"""Watches the daemons of a run's own Ray: without its GCS or its raylet nothing of the run can be started or mended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from relax_core.control.host.process_trees import GONE, LONGEST_GAP_S, process_state

LOOK_S = 0.25
STOPPED = "T"  # how a `process_state` begins where a process was stopped


class RayWatch:
    """Use as a context manager. A daemon that is gone, or stopped for ``frozen_after_s`` seconds, is told to ``lost``,
    once, in a thread of its own: whoever waits for Ray then may wait for good."""

    def __init__(self, daemons: Mapping[str, int], *, frozen_after_s: float, lost: Callable[[str], None]) -> None:
        """``daemons``: name → process id."""
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
        self._thread.join(LONGEST_GAP_S)  # Ray's own end comes next, and is no loss

    def _watch(self) -> None:
        looked = time.monotonic()
        stopped_s = dict.fromkeys(self._daemons, 0.0)
        while not self._ended.wait(LOOK_S):
            now = time.monotonic()
            looked, passed = now, min(now - looked, LONGEST_GAP_S)
            for name, pid in self._daemons.items():
                state = process_state(pid)
                stopped_s[name] = stopped_s[name] + passed if state.startswith(STOPPED) else 0.0
                if state.startswith(GONE):
                    self._lost(f"Ray's {name} died")
                    return
                if stopped_s[name] > self._frozen_after_s:
                    self._lost(f"Ray's {name} froze (stopped for {stopped_s[name]:.0f} s, state {state})")
                    return
