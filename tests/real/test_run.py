"""Tests three asynchronous steps on real weights: the run is killed, resumed and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.live_run import LiveRun, run_to_end

pytestmark = pytest.mark.real

STEPS = 3
OVERRIDES = (
    "experiment=smollm2_sums",
    "model.dtype=float32",
    "reward=f1",
    "reward.public=true",  # this reward varies between answers that are truncated
    "optimizer.lr=1e-4",
    "optimizer.warmup_steps=0",
    "mode=async",
    "mode.max_staleness=1",
    f"run.steps={STEPS}",
    "run.save_every=1",
    "run.keep_last=1",
    "rollout.prompts_per_step=2",
    "rollout.max_new_tokens=12",
    "algo.group_size=6",
    "eval.every=0",
    "eval.rows=4",
)


def test_a_run_that_was_killed_goes_on_and_its_export_loads(tmp_path: Path, smollm2: Path, reference: Any) -> None:
    folder = tmp_path / "run"
    with LiveRun(folder, *OVERRIDES) as live:
        live.wait_checkpoint(1)
        live.kill_everything()
    resumed = run_to_end(folder, *OVERRIDES, "resume=auto")
    assert resumed.code == 0, resumed.output
    assert len(resumed.steps()) == resumed.summary["steps"] == STEPS
    assert resumed.summary["staleness"]["max"] <= 1
    resumed.assert_all_samples_accounted()
    # On policy and in float32, the engine and the trainer compute the same log-probs.
    assert max(step["logprob_gap_max"] for step in resumed.steps() if "logprob_gap_max" in step) <= 2e-4

    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    before = reference.state_dict()
    moved = max(float((value - before[name]).abs().max()) for name, value in trained.state_dict().items())
    assert 0 < moved <= 0.01  # the change of three Adam steps
    assert AutoTokenizer.from_pretrained(folder / "hf").encode("27") == AutoTokenizer.from_pretrained(smollm2).encode(
        "27"
    )
