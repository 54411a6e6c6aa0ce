"""Statistics of runs that differ by their seed alone: mean and standard deviation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_NOT_COMPARED = ("seed", "resume", "plan", "run", "launcher")  # settings that differ between seeds, and locations


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Holds ``mean`` and sample standard deviation ``std`` of ``count`` values; the deviation of one value is 0."""

    mean: float
    std: float
    count: int

    def words(self, form: str) -> str:
        """Returns "mean ± std" with both numbers in the format ``form``."""
        return f"{format(self.mean, form)} ± {format(self.std, form)}"


def spread_of(values: Sequence[float]) -> Spread:
    """Returns the mean and the deviation of at least one value."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Spread(mean=mean, std=math.sqrt(squares / max(1, len(values) - 1)), count=len(values))


def settings_of(folder: Path) -> str | None:
    """Returns the settings of a run without the seed, as JSON, for comparisons with other runs.

    Returns None if the run's config.yaml does not exist or names no seed.
    """
    file = folder / "config.yaml"
    values: Any = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    if not isinstance(values, dict) or values.get("seed") is None:
        return None
    kept = {key: value for key, value in values.items() if key not in _NOT_COMPARED}
    return json.dumps(kept | {"run.steps": values.get("run", {}).get("steps")}, sort_keys=True)


def mean_curve(curves: Sequence[Mapping[int, float]]) -> dict[int, Spread]:
    """Returns step → mean and spread, at the steps that all curves with any step have."""
    curves = [curve for curve in curves if curve]
    steps = set(curves[0]).intersection(*curves[1:]) if curves else set()
    return {step: spread_of([curve[step] for curve in curves]) for step in sorted(steps)}
