"""Computes metrics of training rewards: their outputs, their times, and the times of reward workers."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median, quantiles

from relax_core.contracts.reward import RewardOutput

UNSCORABLE = "unscorable"  # the cause of a missing reward if the output names no cause
_CAUSE = re.compile(r"[a-z_]{1,32}")


class RewardMetrics:
    """Counts the outputs of one reward since the last `take`; callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._ms: list[float] = []
        self._values: list[float] = []
        self._causes: Counter[str] = Counter()

    def record(self, outputs: Sequence[RewardOutput], *, seconds: float) -> None:
        """Counts the outputs of one call that took ``seconds``; each answer gets an equal share of the time."""
        with self._lock:
            self._ms += [1e3 * seconds / len(outputs)] * len(outputs)
            for output in outputs:
                if output.reward is not None:
                    self._values.append(output.reward)
                else:
                    self._causes[output.cause if _CAUSE.fullmatch(output.cause) else UNSCORABLE] += 1

    def take(self) -> dict[str, float]:
        """Returns the metrics since the last call; empty if no answer was scored.

        ``answers`` is the number of answers. ``mean`` is the mean reward. ``none`` is the share of answers without a
        reward, and ``none/CAUSE`` is the share for one cause. ``ms_p50`` and ``ms_p99`` are percentiles of the time per
        answer.
        """
        with self._lock:
            ms, values, causes = self._ms, self._values, self._causes
            self._begin()
        if not ms:
            return {}
        return {
            "answers": float(len(ms)),
            **({"mean": fmean(values)} if values else {}),
            "none": causes.total() / len(ms),
            **{f"none/{cause}": count / len(ms) for cause, count in causes.items()},
            **times(ms),
        }


class WorkerTimes:
    """Stores the times of each reward worker per answer since the last `take`; callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ms: dict[int, list[float]] = {}

    def record(self, worker: int, *, answers: int, seconds: float) -> None:
        """Records one call to a worker with ``answers`` training answers, at least one."""
        with self._lock:
            self._ms.setdefault(worker, []).extend([1e3 * seconds / answers] * answers)

    def take(self) -> dict[str, float]:
        """Returns the number of answers and the median milliseconds per answer, as reward_worker/NUMBER/METRIC."""
        with self._lock:
            found, self._ms = self._ms, {}
        values: dict[str, float] = {}
        for worker, ms in sorted(found.items()):
            values[f"reward_worker/{worker}/answers"] = float(len(ms))
            values[f"reward_worker/{worker}/ms_p50"] = round(median(ms), 3)
        return values


def times(ms: Sequence[float]) -> dict[str, float]:
    """Returns the median (``ms_p50``) and the 99th percentile (``ms_p99``) of one or more times in ms."""
    ranked = quantiles(ms, n=100, method="inclusive") if len(ms) > 1 else [*ms] * 99
    return {"ms_p50": ranked[49], "ms_p99": ranked[98]}
