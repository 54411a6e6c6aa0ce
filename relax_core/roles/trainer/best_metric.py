"""The best evaluation of a run by one of its figures: whose checkpoint is kept, and when the run has waited long enough
for a better one."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from relax_core.observe.service.records import EVAL


@dataclass(frozen=True, kw_only=True)
class Best:
    """``version``: weights with the highest ``value``, the first of equals."""

    version: int
    value: float


class BestMetric:
    """Thread-safe. ``metric``: a figure of the source ``eval``, such as eval/exact. ``patience``: so many evaluations
    in a row without a new best are enough; 0: never. ``candidates``: versions that are evaluated and have a checkpoint.
    ``seen``: version → value of evaluations before a resume."""

    def __init__(self, metric: str, *, patience: int, candidates: Iterable[int], seen: Mapping[int, float]) -> None:
        self._name = metric.removeprefix(f"{EVAL}/")
        self._patience = patience
        self._candidates = frozenset(candidates)
        self._seen = dict(seen)
        self._lock = threading.Lock()

    @property
    def candidates(self) -> frozenset[int]:
        return self._candidates

    def take(self, version: int, values: Mapping[str, float]) -> None:
        """An evaluation is in. One that is told twice, after a restart, counts once."""
        with self._lock:
            self._seen[version] = values[self._name]

    def seen(self) -> dict[int, float]:
        """Version → value of all evaluations so far."""
        with self._lock:
            return dict(self._seen)

    def best(self) -> Best | None:
        seen = self.seen()
        if not seen:
            return None
        version = max(sorted(seen), key=lambda one: seen[one])
        return Best(version=version, value=seen[version])

    def exhausted(self) -> bool:
        """Whether the last ``patience`` evaluations, or more, brought no new best."""
        best, seen = self.best(), self.seen()
        return bool(self._patience) and best is not None and sum(one > best.version for one in seen) >= self._patience

    def kept(self) -> set[int]:
        """Versions whose checkpoints stay: the best one's, and those whose evaluation is still to come. Evaluations
        come in order, so that one which was passed over comes no more."""
        best, seen = self.best(), self.seen()
        newest = max(seen, default=-1)
        pending = {version for version in self._candidates if version > newest}
        return pending | ({best.version} if best is not None else set())
