"""What a bus is told once, when the run starts."""

from __future__ import annotations

import math
from typing import Literal

import msgspec


class BusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``groups_per_step``: rows one train step consumes. ``group_size``: samples a row. ``total_steps``: train steps of
    the whole run. ``inline_bytes``: payloads up to this size travel inside the message, larger ones as object refs.
    ``max_row_bytes``: a row whose payloads sum up to more is refused. ``spare_groups``: over-sampling, how many more
    groups than a step needs are let in; ``surplus``: what becomes of those that a step did not need.
    ``rollout_workers``: how many workers of the rollout share the groups."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    on_stale: Literal["drop", "mask"]
    total_steps: int
    inline_bytes: int
    max_row_bytes: int
    spare_groups: int = 0
    surplus: Literal["drop", "keep"] = "drop"
    rollout_workers: int = 1

    @property
    def most_in_flight(self) -> int | None:
        """Groups that one of several rollout workers may have in flight: its part of all that admission lets in, one
        step past the window. None where a worker is alone."""
        if self.rollout_workers == 1:
            return None
        return math.ceil((self.max_staleness + 2) * (self.groups_per_step + self.spare_groups) / self.rollout_workers)

    @property
    def window_groups(self) -> int:
        """Groups that may be out at a time and may be started by the weights in force."""
        steps = self.max_staleness + 1
        return steps * self.groups_per_step + self.spare_groups * (1 if self.surplus == "keep" else steps)

    def __post_init__(self) -> None:
        lowest = {
            "groups_per_step": 1,
            "group_size": 1,
            "max_staleness": 0,
            "total_steps": 1,
            "inline_bytes": 0,
            "max_row_bytes": 1,
            "spare_groups": 0,
            "rollout_workers": 1,
        }
        for key, low in lowest.items():
            if getattr(self, key) < low:
                raise ValueError(f"bus: {key}={getattr(self, key)} is too small: give {low} or more")
        if self.on_stale not in ("drop", "mask"):
            raise ValueError(f"bus: on_stale={self.on_stale!r} is unknown: give 'drop' or 'mask'")
        if self.surplus not in ("drop", "keep"):
            raise ValueError(f"bus: surplus={self.surplus!r} is unknown: give 'drop' or 'keep'")
