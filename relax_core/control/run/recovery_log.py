"""The book of a run's recoveries: what died, what was done, and how long no train step ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

IN_PLACE = 1
FROM_CHECKPOINT = 2


def recoveries_file(run_dir: Path) -> Path:
    """Where a run keeps the book."""
    return run_dir / "logs" / "recoveries.json"


@dataclass(kw_only=True)
class Recovery:
    """``tier``: 1, one process was started again in place; 2, all services from a checkpoint. ``at_step``: train steps
    done when it was noticed. ``from_step``: where the run went on. ``seconds``: until the next train step was done;
    None where none was."""

    tier: int
    cause: str
    at_step: int
    from_step: int
    seconds: float | None = None


class Recoveries:
    """All recoveries of a run, in order, kept in ``file``: a controller that follows a killed one reads them there.
    ``tell`` gets one line about each, twice: when it begins and when training goes on."""

    def __init__(self, file: Path, *, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._tell = tell
        self._clock = clock
        self._all: list[Recovery] = []
        self._open: list[tuple[Recovery, float]] = []

    def take_up(self) -> None:
        """Goes on with what an earlier controller of this run had kept."""
        if self._file.exists():
            self._all = msgspec.json.decode(self._file.read_bytes(), type=list[Recovery])

    def begin(self, tier: int, cause: str, *, at_step: int, from_step: int, noticed: float | None = None) -> None:
        """Something died: just now, or at ``noticed`` on the clock."""
        recovery = Recovery(tier=tier, cause=cause, at_step=at_step, from_step=from_step)
        self._all.append(recovery)
        self._open.append((recovery, self._clock() if noticed is None else noticed))
        done = "started again in place" if tier == IN_PLACE else f"all services start again from step {from_step}"
        self._tell(f"tier {tier} at step {at_step}: {cause}; {done}")
        self._keep()

    def _keep(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_name(f"{self._file.name}.partial")
        partial.write_bytes(msgspec.json.encode(self._all))
        os.replace(partial, self._file)  # a controller that is killed here leaves the earlier one whole

    def step_done(self) -> None:
        """A train step ended: whatever was under way has succeeded."""
        for recovery, began in self._open:
            recovery.seconds = self._clock() - began
            self._tell(
                f"tier {recovery.tier} at step {recovery.at_step}: {recovery.cause}; training went on from step "
                f"{recovery.from_step} after {recovery.seconds:.1f} s"
            )
        if self._open:
            self._open.clear()
            self._keep()

    def count(self, tier: int) -> int:
        return sum(recovery.tier == tier for recovery in self._all)

    def first_cause(self, tier: int) -> str:
        return next(recovery.cause for recovery in self._all if recovery.tier == tier)

    def as_records(self) -> list[dict[str, Any]]:
        """For summary.json."""
        return [asdict(recovery) for recovery in self._all]
