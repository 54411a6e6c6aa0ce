"""The settings of a bus, which are fixed at the start of the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from relax_core.config.schema import RelaxConfig

ACTOR = "actor"  # the task that trains and ends groups; all other tasks add columns
INLINE_BYTES = 1 << 16
MAX_ROW_BYTES = 1 << 28


class BusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the settings of a bus. Raises ValueError for a value that is too small or not allowed.

    ``groups_per_step`` is the number of groups that one train step consumes. ``group_size`` is the number of samples in
    a group. ``total_steps`` is the number of train steps of the whole run. ``inline_bytes``: payloads up to this size
    are sent in the message body, larger payloads in separate blocks. ``max_row_bytes``: groups with more bytes are
    refused. ``spare_groups`` is the number of additional groups that over-sampling admits for a step. ``surplus``:
    "drop" or "keep" unused groups for later steps. ``rollout_workers`` is the number of workers that share the groups.
    ``media_folder`` is the folder with the files of media items. It is empty in a run without media. If ``media_nodes``
    is True, each node has a separate folder next to ``media_folder`` (`relax_core.bus.media_storage`). ``mix`` maps
    modalities to their shares of the groups. It is empty without data.mix.
    """

    groups_per_step: int
    group_size: int
    max_staleness: int
    on_stale: Literal["drop", "mask"]
    total_steps: int
    inline_bytes: int = INLINE_BYTES
    max_row_bytes: int = MAX_ROW_BYTES
    spare_groups: int = 0
    surplus: Literal["drop", "keep"] = "drop"
    rollout_workers: int = 1
    media_folder: str = ""
    media_nodes: bool = False
    mix: dict[str, float] = {}

    @classmethod
    def of(cls, config: RelaxConfig, *, media_folder: Path | None, media_nodes: bool) -> BusSettings:
        """Returns the settings of a run's bus."""
        return cls(
            groups_per_step=config.rollout.prompts_per_step,
            group_size=config.algo.group_size,
            max_staleness=config.mode.max_staleness,
            on_stale=config.mode.on_stale.value,
            total_steps=config.run.steps,
            spare_groups=config.rollout.spare_prompts,
            surplus=config.rollout.surplus.value,
            rollout_workers=config.rollout.workers,
            media_folder="" if media_folder is None else str(media_folder),
            media_nodes=media_nodes,
            mix=dict(config.data.mix or {}),
        )

    @property
    def max_in_flight(self) -> int | None:
        """Returns how many groups each of several rollout workers may have in flight; None for a single worker.

        The limit is the worker's share of all groups that can be admitted: up to one step past the window.
        """
        if self.rollout_workers == 1:
            return None
        return math.ceil((self.max_staleness + 2) * (self.groups_per_step + self.spare_groups) / self.rollout_workers)

    @property
    def window_groups(self) -> int:
        """Returns the limit of unfinished groups that may start with the current weights (docs/rollout.md)."""
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
