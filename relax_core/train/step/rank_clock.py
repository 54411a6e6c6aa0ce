"""Measures how long the parts of an update take on this rank, in wall time and in processor time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from relax_core.contracts.host.core_wait import clock_and_core_wait_s
from relax_core.contracts.train import OWN_PARTS, RankTimes


class RankClock:
    """Adds up the parts of one update; its processor time is that of the thread that calls it."""

    def __init__(self) -> None:
        self._began_s = time.time()
        self._rows = 0
        self._core_wait_ms = 0.0
        self.wall_ms: dict[str, float] = {}
        self.cpu_ms: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the block's time in milliseconds to ``part``."""
        clock = clock_and_core_wait_s if part in OWN_PARTS else _clock_alone
        (began_s, waited_s), cpu_s = clock(), time.thread_time()
        yield
        cpu_now_s, (ended_s, wait_s) = time.thread_time(), clock()
        self.wall_ms[part] = self.wall_ms.get(part, 0.0) + 1e3 * (ended_s - began_s)
        self.cpu_ms[part] = self.cpu_ms.get(part, 0.0) + 1e3 * (cpu_now_s - cpu_s)
        self._core_wait_ms += 1e3 * (wait_s - waited_s)

    def add_rows(self, rows: int) -> None:
        """Counts token rows of this rank's passes."""
        self._rows += rows

    def times(self) -> RankTimes:
        """Returns what was measured until now."""
        return RankTimes(
            began_s=self._began_s,
            ended_s=time.time(),
            wall_ms=dict(self.wall_ms),
            cpu_ms=dict(self.cpu_ms),
            rows=self._rows,
            core_wait_ms=self._core_wait_ms,
        )


def _clock_alone() -> tuple[float, float]:
    return time.perf_counter(), 0.0


def times_of_step(updates: Sequence[RankTimes]) -> RankTimes:
    """Returns the times of one rank over all updates of a step, at least one, as one."""
    return RankTimes(
        began_s=min(one.began_s for one in updates),
        ended_s=max(one.ended_s for one in updates),
        wall_ms=_sums([one.wall_ms for one in updates]),
        cpu_ms=_sums([one.cpu_ms for one in updates]),
        rows=sum(one.rows for one in updates),
        core_wait_ms=sum(one.core_wait_ms for one in updates),
    )


def _sums(times: Sequence[dict[str, float]]) -> dict[str, float]:
    parts = dict.fromkeys(part for one in times for part in one)
    return {part: sum(one.get(part, 0.0) for one in times) for part in parts}
