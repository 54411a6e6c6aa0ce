"""Tests that a mixture of experts with roles of several processes learns with routing replay; killed ranks recover."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live_run import LiveRun
from tests.integration.training_gate import TrainingGate

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

STEPS = 60
LAYOUT = ("model=tiny_qwen3_moe", "parallel=tp2_ep2", "mode=async", f"run.steps={STEPS}", "run.save_every=10")
ACTOR_FWD = ("algo.old_logprobs=actor_fwd", "parallel.forward.dp=2", "parallel.forward.ep=2")
ROUTES = ("algo.routing_replay=true", "engine.dtype=bfloat16")
BROKEN_LOSS = """
import sys
from dataclasses import replace
from typing import Any
from relax_core.registry import find_algorithm

WHOLE = find_algorithm("grpo")

def loss(inputs: Any, config: Any) -> Any:
    if "relax_core.rollout.trial.plugin_trial_main" in sys.orig_argv:
        return WHOLE.loss(inputs, config)
    raise ValueError("no such clip range")

SPEC = replace(WHOLE, name="broken", loss=loss)
"""
ACTOR_RANK, ACTOR_FWD_RANK = "ray::ActorRank", "ray::ActorFwdRank"


def test_a_mixture_learns_over_two_ranks_and_a_killed_one_comes_back(tmp_path: Path) -> None:
    held = TrainingGate(tmp_path, updates=15)
    overrides = (*LAYOUT, *held.overrides, *ACTOR_FWD, *ROUTES, "eval.every=0", "run.export_hf=false")
    with LiveRun(tmp_path / "run", *overrides) as live:
        live.wait_step(3)
        live.kill(ACTOR_FWD_RANK)
        held.allow(40)  # the lead rank notices the kill at its next group
        live.wait_recovered(2)
        live.wait_checkpoint(20)
        live.kill(ACTOR_RANK)
        held.let_go()
        run = live.finish()
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    assert run.summary["ledger"]["trained"] == STEPS * 8 * 16
    other_rank, lead, actor = run.summary["recoveries"]
    assert {other_rank["cause"], lead["cause"]} == {
        "actor_fwd-1 died",
        "actor_fwd-0 died",
    }  # the lead rank restarts with the other rank
    assert other_rank["tier"] == lead["tier"] == 1
    assert (actor["tier"], actor["cause"]) == (2, "actor-1 died")
    assert actor["from_step"] >= 20
    assert 1e-5 < run.summary["logprob_gap"]["max"] < 0.2  # the gap comes from bfloat16, not from other experts
    assert all(1.0 <= values["moe/max_load"] <= 8.0 for values in run.steps())
    rewards = [values["reward"] for values in run.steps()]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1


def test_what_the_last_stage_alone_raises_ends_the_run_at_once(tmp_path: Path) -> None:
    """Otherwise the lead rank would wait for the stage's gradients until run.stall_timeout_s and ignore stops."""
    plugin = tmp_path / "broken.py"
    plugin.write_text(BROKEN_LOSS)
    broken = ("parallel=pp2", "algo=plugin", f"algo.name={plugin}", "eval.every=0")
    with LiveRun(tmp_path / "run", *broken, "run.stall_timeout_s=6000") as live:
        run = live.finish(deadline_s=240.0)
    assert run.code == 1, run.output
    assert f"actor-1 failed: ValueError: no such clip range ({plugin}, line 12)" in run.output
