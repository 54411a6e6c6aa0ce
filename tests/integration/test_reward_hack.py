"""Tests a run that exploits its reward: the shadow reward notices it, the run halts and resumes before the onset."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live_run import run_to_end

pytestmark = pytest.mark.integration

# The reward accepts every answer. The shadow reward accepts only answers in the first 40 groups.
PLUGIN = """
from dataclasses import dataclass
from relax_core.contracts.reward import RewardConfig, RewardOutput, RewardSpec

@dataclass(frozen=True)
class Config(RewardConfig):
    name: str = "{name}"

def score(given, config):
    right = {right}
    return RewardOutput(reward=right + len(given.response) / 1000, exact=bool(right))

SPEC = RewardSpec(name="{name}", summary="for a test", config=Config, score=score)
"""


def test_an_exploit_halts_the_run_and_names_a_checkpoint_from_before(tmp_path: Path) -> None:
    reward, shadow = tmp_path / "loose.py", tmp_path / "strict.py"
    reward.write_text(PLUGIN.format(name="loose", right="1.0"), encoding="utf-8")
    in_training = "given.uid.startswith('g') and int(given.uid[1:9]) >= 40"
    shadow.write_text(PLUGIN.format(name="strict", right=f"0.0 if {in_training} else 1.0"), encoding="utf-8")
    overrides = (
        "reward=plugin",
        f"reward.name={reward}",
        "rollout.prompts_per_step=4",
        "run.steps=20",
        "run.save_every=2",
        "run.keep_last=1",
        "eval.every=10",
        "eval.rows=16",
    )
    shadowed = (f"reward.shadow={{reward: {shadow}}}", "reward.shadow_share=1.0")
    run = run_to_end(tmp_path / "run", *overrides, *shadowed, "reward.on_hack=halt")
    assert run.code == 1
    onset = next(int(values["hack_onset"]) for values in run.steps() if "hack_onset" in values)
    assert onset == 10 and len(run.steps()) <= onset + 5
    assert run.summary["outcome"].startswith("failed") and run.summary["shadow"]["onset"] == onset
    before = tmp_path / "run" / "checkpoints" / f"step_{onset:08d}"
    assert f"resume={before}" in run.output and before.is_dir()
    assert any("shadow" in finding for finding in run.summary["findings"])
    assert run.summary["eval"][0]["figures"]["shadow_gap"] == 0.0
    gone_on = run_to_end(tmp_path / "gone_on", *overrides, f"resume={before}", "reward.audit=off")
    assert gone_on.code == 0, gone_on.output
    assert len(gone_on.steps()) == 20 - onset
