"""Tracks the best evaluation of a run, whose checkpoint is kept, and decides when the run ends without a better one."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from relax_core.observe.service.records import EVAL


@dataclass(frozen=True, kw_only=True)
class Best:
    """Is the weights ``version`` with the highest ``value``; the first one of equal values."""

    version: int
    value: float


class BestMetric:
    """Tracks one figure of the evaluations; thread-safe.

    ``metric`` is a figure of the source ``eval``, such as eval/exact. ``patience`` is the number of evaluations in a
    row without a new best after which the run ends; 0 means never. ``candidates`` are the versions that are evaluated
    and have a checkpoint. ``seen`` maps versions to values of the evaluations before a resume.
    """

    def __init__(self, metric: str, *, patience: int, candidates: Iterable[int], seen: Mapping[int, float]) -> None:
        self._name = metric.removeprefix(f"{EVAL}/")
        self._patience = patience
        self._candidates = frozenset(candidates)
        self._seen = dict(seen)
        self._lock = threading.Lock()

    @property
    def candidates(self) -> frozenset[int]:
        """Returns the versions that are evaluated and have a checkpoint."""
        return self._candidates

    def add(self, version: int, values: Mapping[str, float]) -> None:
        """Adds an evaluation; one that is reported again after a restart counts once."""
        with self._lock:
            self._seen[version] = values[self._name]

    def seen(self) -> dict[int, float]:
        """Returns the values of all evaluations so far by version."""
        with self._lock:
            return dict(self._seen)

    def best(self) -> Best | None:
        """Returns the best evaluation so far, or None before the first one."""
        seen = self.seen()
        if not seen:
            return None
        version = max(sorted(seen), key=lambda one: seen[one])
        return Best(version=version, value=seen[version])

    def exhausted(self) -> bool:
        """Returns True if at least the last ``patience`` evaluations brought no new best."""
        best, seen = self.best(), self.seen()
        return bool(self._patience) and best is not None and sum(one > best.version for one in seen) >= self._patience

    def kept(self) -> set[int]:
        """Returns the versions whose checkpoints stay: the best one, and those whose evaluation is still to come.

        Evaluations come in order, so a version older than the newest evaluation is not evaluated any more.
        """
        best, seen = self.best(), self.seen()
        newest = max(seen, default=-1)
        pending = {version for version in self._candidates if version > newest}
        return pending | ({best.version} if best is not None else set())
