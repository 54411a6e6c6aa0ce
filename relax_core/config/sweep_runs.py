"""Defines what receives the runs of a sweep, so that Hydra stays within compose.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from relax_core.config.errors import ConfigError
from relax_core.config.schema import RelaxConfig


class SweepRuns(Protocol):
    """Receives the runs of a sweep one by one.

    ``overrides`` are those of one run, as its user would type them. ``swept`` are those of them in which the runs
    differ. ``folder`` is that of the sweep.
    """

    def take(self, config: RelaxConfig, overrides: Sequence[str], folder: Path, *, swept: Sequence[str]) -> object:
        """Accepts a valid run."""

    def refuse(self, overrides: Sequence[str], folder: Path, *, swept: Sequence[str], error: ConfigError) -> None:
        """Records a run whose configuration is not valid."""

    def finish(self) -> int:
        """Starts the runs after the last one was taken, and returns the exit code."""


class SweepFailed(RuntimeError):
    """A run failed, and the sweeper needs its value."""
