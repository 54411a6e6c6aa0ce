"""Pauses training after a number of updates until the test continues training.

So a test can act on a run before its end, on machines of any speed.
"""

from __future__ import annotations

import os
from pathlib import Path

PLUGIN = """
import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path

from relax_core.registry import find_algorithm

WHOLE = find_algorithm({algorithm!r})
LIMIT = Path({limit!r})
DEADLINE_S = 900.0
TRIAL = "relax_core.rollout.trial.plugin_trial_main" in sys.orig_argv  # before the start, where nothing is trained
updates = itertools.count()


def denominator(totals, config):
    update, deadline = next(updates), time.monotonic() + DEADLINE_S
    while not TRIAL and update >= int(LIMIT.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the test did not let training go on after {{update}} updates")
        time.sleep(0.01)
    return WHOLE.denominator(totals, config)


SPEC = replace(WHOLE, name="held", denominator=denominator)
"""
NO_LIMIT = 1_000_000_000


class TrainingGate:
    """Writes an algorithm plug-in into ``folder``. With it each training process waits after ``updates`` optimizer
    updates. A restarted process counts from 0. ``overrides`` select the plug-in in a run.
    """

    def __init__(self, folder: Path, *, updates: int, algorithm: str = "grpo") -> None:
        self._limit = folder / "updates"
        self.allow(updates)
        plugin = folder / "held.py"
        plugin.write_text(PLUGIN.format(algorithm=algorithm, limit=str(self._limit)))
        self.overrides = ("algo=plugin", f"algo.name={plugin}")

    def allow(self, updates: int) -> None:
        """Sets the total number of updates that each process may do."""
        new = self._limit.with_suffix(".new")
        new.write_text(str(updates))
        os.replace(new, self._limit)

    def let_go(self) -> None:
        self.allow(NO_LIMIT)
