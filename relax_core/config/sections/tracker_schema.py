"""Defines the type of the keys of `tracker`, and which groups of a run are kept with their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

ALL_SAMPLES = "all"


@dataclass
class TrackerConfig:
    """Holds the keys of `tracker`."""

    name: str = MISSING
    tensorboard: bool = MISSING
    jsonl: bool = MISSING
    samples: str = ALL_SAMPLES  # "all", or the number of groups of a train step
    samples_max_mb: int = 2048
    sinks: Any = None  # plug-ins: a list of names and paths, or a mapping from each of them to its configuration


def kept_groups(tracker: TrackerConfig, *, groups_per_step: int) -> int:
    """Returns how many of every ``groups_per_step`` neighbouring groups are kept, between 0 and all of them.

    Raises ValueError for a value that is neither "all" nor a number of groups.
    """
    if tracker.samples == ALL_SAMPLES:
        return groups_per_step
    if not tracker.samples.isdecimal():
        raise ValueError(
            f"tracker.samples={tracker.samples}: give all, or how many groups a train step keeps; 0 keeps none."
        )
    return min(int(tracker.samples), groups_per_step)
