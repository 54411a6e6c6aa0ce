"""Tests stopped and resumed runs of models with sounds and with layer states: they are equal to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live_run import LiveRun, run_to_end
from tests.integration.test_on_policy import assert_same_run
from tests.integration.training_gate import TrainingGate

pytestmark = [pytest.mark.integration, pytest.mark.soak]

STEPS, STOPPED_AFTER, GROUP_SIZE, PROMPTS = 8, 3, 4, 8
STRICT = (
    *("mode=async", "mode.max_staleness=0", f"run.steps={STEPS}", "run.save_every=0"),
    *(f"algo.group_size={GROUP_SIZE}", f"rollout.prompts_per_step={PROMPTS}", "eval.every=4", "eval.rows=16"),
    *("engine.start_timeout_s=600", "run.start_timeout_s=600"),
)
MIX = "data.mix={video: 0.25, text: 0.25, image: 0.5}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("model=tiny_qwen3_omni", "data=four_modalities", "algo.routing_replay=true"),
        ("model=tiny_qwen3_5", "data=see"),
        ("model=tiny_qwen3_vl", "data=see", MIX),
    ],
    ids=["omni", "states", "mix"],
)
def test_a_run_that_stops_and_goes_on_is_the_same_to_the_bit(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Runs at staleness 0. Also restores the cursor of a mix by modality."""
    straight = run_to_end(tmp_path / "straight", *STRICT, *arguments)
    assert straight.code == 0, straight.output
    straight.assert_all_samples_accounted()
    held = TrainingGate(tmp_path, updates=STOPPED_AFTER + 1)
    overrides = (*STRICT, *arguments, *held.overrides)
    with LiveRun(tmp_path / "run", *overrides) as live:
        live.wait_step(STOPPED_AFTER - 1)
        live.interrupt()
        live.wait_stop_received()
        held.let_go()
        stopped = live.finish()
    assert stopped.code == 130, stopped.output
    assert STOPPED_AFTER <= stopped.summary["steps"] < STEPS
    resumed = run_to_end(tmp_path / "run", *overrides, "resume=auto")
    assert resumed.code == 0, resumed.output
    resumed.assert_all_samples_accounted()
    assert resumed.summary["ledger"]["trained"] == STEPS * PROMPTS * GROUP_SIZE
    assert_same_run(resumed, straight)
