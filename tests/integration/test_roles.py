"""A run with four trainer ranks against one with a single rank: a proof of the whole, which takes minutes.

`tests/train/test_parity_layouts.py` compares every layout with one rank, and `test_truncated.py` has a run with two
trainer ranks over the second bus.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live_run import run_to_end

pytestmark = [pytest.mark.integration, pytest.mark.soak]

SHORT = ("run.steps=6", "eval.every=0", "run.save_every=0")


def test_four_trainer_ranks_train_what_one_does(tmp_path: Path) -> None:
    """Two replicas of two ranks each read their own rows, here from TransferQueue."""
    # Adam divides by the gradient's size: with its usual epsilon, rounding of a near-zero gradient becomes a full step.
    strict = (*SHORT, "mode.max_staleness=0", "optimizer.eps=1e-2", "optimizer.lr=1e-2")
    one = run_to_end(tmp_path / "one", *strict)
    four = run_to_end(tmp_path / "four", *strict, "parallel=tp2_sp", "parallel.dp=2", "bus=transfer_queue")
    for run in (one, four):
        assert run.code == 0, run.output
        run.assert_books_closed()
    for values, expected in zip(four.steps(), one.steps(), strict=True):
        assert values["reward"] == expected["reward"] and values["tokens"] == expected["tokens"]
        assert values["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert values["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    expected_weights = one.weights()
    assert max(float((tensor - expected_weights[name]).abs().max()) for name, tensor in four.weights().items()) <= 1e-5
