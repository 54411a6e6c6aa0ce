"""Derives the figures of a run in progress from its records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice

from relax_core.observe.service.records import ACTOR, EVAL, ROLLOUT, MetricRecord, is_resume

KEPT_STEPS = 2_000
RATE_STEPS = 20  # speed is the mean over this number of newest steps
CURVES = ("reward", "exact", "entropy")  # what is kept of older steps; all values of a step take some 10 KB


class RunningNumbers:
    """Holds all values of the newest steps, and the curves.

    A record that is merged twice counts once.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[int, Mapping[str, float]]] = {ACTOR: {}, EVAL: {}, ROLLOUT: {}}

    def merge(self, records: Iterable[MetricRecord]) -> None:
        """Takes records in order. A resume removes the later steps."""
        for record in records:
            if is_resume(record):
                for values in self._values.values():
                    for step in [step for step in values if step >= record.step]:
                        del values[step]
            elif record.source in self._values:
                values = self._values[record.source]
                values[record.step] = record.values
                for older in list(islice(reversed(values), RATE_STEPS, RATE_STEPS + 1)):
                    values[older] = {name: values[older][name] for name in CURVES if name in values[older]}
                if len(values) > KEPT_STEPS:
                    del values[next(iter(values))]

    def latest(self, name: str, *, source: str = ACTOR) -> float | None:
        """Returns the newest finite value, or None."""
        for values in reversed(self._values[source].values()):
            if name in values and math.isfinite(values[name]):
                return values[name]
        return None

    def of_step(self, name: str, step: int, *, source: str = ACTOR) -> float | None:
        """Returns the finite value that the record of this step has, or None."""
        value = self._values[source].get(step, {}).get(name)
        return value if value is not None and math.isfinite(value) else None

    def of_newest_step(self, name: str, *, source: str = ACTOR) -> float | None:
        """Returns the newest record's value, or None if that record has none."""
        newest = self.newest(source)
        return newest[name] if name in newest and math.isfinite(newest[name]) else None

    def newest(self, source: str) -> Mapping[str, float]:
        """Returns the values of the newest record; none before the first one."""
        return next(reversed(self._values[source].values()), {})

    def latest_step(self, source: str, *, most: float = math.inf) -> int | None:
        """Returns the step of the newest record up to step ``most``, or None."""
        return next((step for step in reversed(self._values[source]) if step <= most), None)

    def curve(self, name: str, *, source: str = ACTOR) -> list[float]:
        """Returns the value of each step that has one, in order; ``name`` is one of `CURVES`."""
        return [values[name] for values in self._values[source].values() if name in values]

    def per_second(self, name: str) -> float | None:
        """Returns how much of ``name`` the newest steps did in a second of wall time."""
        timed = self._timed()
        milliseconds = sum(values["step_ms"] for values in timed)
        return 1e3 * sum(values.get(name, 0.0) for values in timed) / milliseconds if milliseconds else None

    def mean_step_ms(self) -> float | None:
        """Returns the mean wall time of the newest steps, in milliseconds."""
        timed = self._timed()
        return sum(values["step_ms"] for values in timed) / len(timed) if timed else None

    def _timed(self) -> list[Mapping[str, float]]:
        newest = list(self._values[ACTOR].values())[-RATE_STEPS:]
        return [values for values in newest if "step_ms" in values]
