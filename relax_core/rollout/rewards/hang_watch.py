"""Reports a reward that hangs in the rollout process, where no other thread can end the call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from relax_core.contracts.monitor import Check, Finding, Monitor
from relax_core.contracts.reward import RewardConfig

CHECK_S = 1.0
CHECKS = 4  # least number of checks per time limit; a pause of the whole process is counted as one check
MIN_WAIT_S = 1.0  # shorter waits are ignored: the call may wait for its turn to compute
COMPUTES = 0.05  # share of a core; calls that use less CPU do not wait for each other
OnHang = Callable[[RuntimeError], None]


def _thread_cpu_clock() -> int:
    return time.pthread_getcpuclockid(threading.get_ident())


@dataclass
class _Call:
    """Holds a call in flight and its times.

    ``limit_s`` is the time limit, and ``left_s`` is the time left. ``waited_s`` is the time in which all calls only
    waited. The times count from the first check after the start of an answer (``checked``), because the answer may have
    begun just before this check. ``clock`` is the CPU clock of the call's thread.
    """

    limit_s: float
    left_s: float
    checked: bool = False
    waited_s: float = 0.0
    clock: int = field(default_factory=_thread_cpu_clock)
    cpu_s: float = 0.0

    def computed_s(self) -> float:
        """Returns the CPU time since the last call of this method."""
        before, self.cpu_s = self.cpu_s, time.clock_gettime(self.clock)
        return self.cpu_s - before


class HangWatch:
    """Calls ``on_hang`` once, in a separate thread, if scoring takes longer than ``config.timeout_s`` per answer.

    With ``shared``, concurrent calls share one interpreter: if n calls compute for a second, 1/n second is counted for
    each call. If all calls only wait and no answer ends, the whole time is counted, but a wait shorter than
    `MIN_WAIT_S` is not a hang.
    """

    def __init__(self, config: RewardConfig, on_hang: OnHang, *, shared: bool) -> None:
        self._config = config
        self._shared = shared
        self._check_s = min(CHECK_S, config.timeout_s / CHECKS)
        self._lock = threading.Lock()
        self._calls: list[_Call] = []
        self._moves = False  # an answer ended since the last check
        self._monitor = Monitor(
            [
                Check(
                    name="reward",
                    every_s=self._check_s,
                    look=self._look,
                    act=lambda finding: on_hang(RuntimeError(str(finding))),
                    in_thread=True,
                )
            ]
        ).start()

    @contextmanager
    def scoring(self, answers: float) -> Iterator[Callable[[], None]]:
        """Marks that ``answers`` answers are scored while the context is open; callable from any thread.

        Yields a function that marks these answers as done and restarts the time limit for the next answers.
        """
        limit_s = self._config.timeout_s * answers
        call = _Call(limit_s, limit_s)
        call.computed_s()

        def go_on() -> None:
            call.left_s, call.checked, self._moves = limit_s, False, True

        with self._lock:
            self._calls.append(call)
        try:
            yield go_on
        finally:
            with self._lock:
                self._calls = [other_call for other_call in self._calls if other_call is not call]
                self._moves = True

    def close(self) -> None:
        """Ends the checks."""
        self._monitor.end()

    def _look(self) -> Finding | None:
        with self._lock:
            computed_s = sum(call.computed_s() for call in self._calls)
            moves, self._moves = self._moves or computed_s > COMPUTES * self._check_s, False
            for call in self._calls:
                if not call.checked:
                    call.checked = True
                    continue
                call.left_s -= self._check_s / len(self._calls) if self._shared else self._check_s
                call.waited_s = 0.0 if moves else call.waited_s + self._check_s
            hangs = any(call.left_s <= 0 or call.waited_s >= max(MIN_WAIT_S, call.limit_s) for call in self._calls)
        if not hangs:
            return None
        return Finding(
            failed_part=f"reward {self._config.name}:",
            how=f"a group's answers took longer than reward.timeout_s={self._config.timeout_s:g} each, and a reward "
            "that is not isolated cannot be ended. Set isolated=True in its SPEC, or raise reward.timeout_s.",
        )
