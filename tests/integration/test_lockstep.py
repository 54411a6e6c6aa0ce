"""With rollout.lockstep, a run over an env of several turns is one run: side by side, time-shared, or resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.integration.held_training import HeldTraining
from tests.integration.live_run import FinishedRun, LiveRun, run_to_end
from tests.integration.test_on_policy import assert_same_run

pytestmark = pytest.mark.integration

STEPS, STOPPED_AFTER, PROMPTS, GROUP_SIZE = 20, 7, 4, 4
LOCKSTEP = (
    *("env=number_guess", "engine.context_length=192", "rollout.lockstep=true", "mode.max_staleness=0"),
    *(f"algo.group_size={GROUP_SIZE}", f"rollout.prompts_per_step={PROMPTS}", f"run.steps={STEPS}"),
    *("run.save_every=0", "eval.every=10", "eval.rows=8"),
)


def assert_same_games(one: FinishedRun, other: FinishedRun) -> None:
    """The same weights and figures of the steps to the bit, and the same turns."""
    assert_same_run(one, other)
    for run in (one, other):
        run.assert_books_closed()
        assert run.summary["run"]["repeatable"] is True
        assert run.summary["ledger"]["trained"] == STEPS * PROMPTS * GROUP_SIZE
        assert run.summary["logprob_gap"]["max"] <= 2e-5


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    run = run_to_end(tmp_path_factory.mktemp("side_by_side") / "run", *LOCKSTEP)
    assert run.code == 0, run.output
    return run


def test_colocate_is_the_same_run_to_the_bit(side_by_side: FinishedRun, tmp_path: Path) -> None:
    colocate = run_to_end(tmp_path / "run", *LOCKSTEP, "mode=colocate")
    assert colocate.code == 0, colocate.output
    assert_same_games(colocate, side_by_side)
