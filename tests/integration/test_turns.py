"""A whole run over an env with turns: every token's log-prob is the engine's, and the ledger is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live_run import run_to_end

pytestmark = pytest.mark.integration

TOLERANCE = 2e-5


def test_a_game_of_several_turns_trains_on_policy(tmp_path: Path) -> None:
    """Turns under way are aborted at a weight change, and go on with the new weights. The reward scores the last
    response, so that rewards differ within a group."""
    run = run_to_end(
        tmp_path / "run",
        "env=number_guess",
        "engine.context_length=192",
        "algo.group_size=4",
        "rollout.prompts_per_step=4",
        "mode.max_staleness=1",
        "rollout.partial=abort",
        "run.steps=4",
        "run.save_every=0",
        "run.export_hf=false",
        "eval.every=0",
    )
    assert run.code == 0, run.output
    run.assert_books_closed()
    assert len(run.steps()) == 4
    gap = run.summary["logprob_gap"]
    assert gap["tokens"] > 0 and gap["max"] <= TOLERANCE
    assert any(values["grad_norm"] > 0.0 for values in run.steps())
    assert run.summary["ledger"]["trained"] == 4 * 4 * 4
