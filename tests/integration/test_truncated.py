"""Tests that a run with top_p and min_p is on-policy in every role, with a layout per role and bus=transfer_queue."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.integration.live_run import run_to_end

pytestmark = pytest.mark.integration

TOLERANCE = 2e-5


def test_gspo_is_on_policy_under_truncation(tmp_path: Path) -> None:
    """With GSPO's narrow clip range, any difference of the distributions would clip every sample."""
    run = run_to_end(
        tmp_path / "run",
        "algo=gspo",
        "algo.old_logprobs=actor_fwd",
        "algo.kl_coef=0.01",
        "parallel=tp2_sp",
        "parallel.forward.tp=1",
        "parallel.forward.dp=2",
        "optimizer.lr=3e-3",
        "rollout.top_p=0.95",
        "rollout.min_p=0.02",
        "rollout.banned_token_ids=[1]",
        "bus=transfer_queue",
        "mode.max_staleness=0",
        "run.steps=6",
        "run.save_every=0",
        "run.export_hf=false",
        "eval.every=6",
        "eval.rows=16",
    )
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    assert len(run.steps()) == 6
    assert run.summary["ledger"]["trained"] == 6 * 8 * 16
    for values in run.steps():
        assert values["logprob_gap_tokens"] == values["tokens"] and values["logprob_gap_max"] <= TOLERANCE
        for name in ("ratio", "ratio_low", "ratio_high", "tis_weight"):
            assert values[f"algorithm/{name}"] == pytest.approx(1.0, abs=TOLERANCE), name
        assert values["algorithm/clip_low"] == values["algorithm/clip_high"] == 0.0
    assert run.steps()[0]["algorithm/reference_kl"] == pytest.approx(0.0, abs=TOLERANCE)
    assert run.steps()[-1]["algorithm/reference_kl"] > 1e-5, "the policy differs from the reference"
    assert len(run.summary["eval"]) == 2
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["rollout"]["banned_token_ids"] == [1]
