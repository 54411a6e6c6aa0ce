"""Tests the metrics of each reward: number of answers, mean, failures by reason, and milliseconds."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.plugin_types import plugin_config
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.registry import find_reward
from relax_core.rollout.rewards.reward_metrics import RewardMetrics
from relax_core.rollout.rewards.reward_pool import RewardPool

ISOLATED = """
import os, time
from relax_core.contracts.reward import RewardConfig, RewardSpec

def score(given, config):
    if given.response == "hang":
        time.sleep(60)
    if given.response == "die":
        os._exit(3)
    if given.response == "grow":
        bytearray(3 << 30)
    if given.response == "raise":
        raise KeyError("no such key")
    if given.response == "nan":
        return float("nan")
    return len(given.response) / 10

SPEC = RewardSpec(name="odd", summary="fails in every way", config=RewardConfig, score=score, isolated=True)
"""


def given(response: str, *, uid: str = "u", **row: Any) -> RewardInput:
    return RewardInput(response=response, stopped=True, answer="1", row={"answer": "1", **row}, uid=uid)


def test_figures_by_hand() -> None:
    metrics = RewardMetrics()
    assert metrics.take() == {}
    metrics.record([RewardOutput(reward=1.0), RewardOutput(reward=None, cause="timeout")], seconds=0.004)
    metrics.record([RewardOutput(reward=0.5)], seconds=0.008)
    metrics.record([RewardOutput(reward=None, reason="no idea", cause="Not one word")], seconds=0.002)
    assert metrics.take() == pytest.approx(
        {
            "answers": 4,
            "mean": 0.75,
            "none": 0.5,
            "none/timeout": 0.25,
            "none/unscorable": 0.25,
            "ms_p50": 2.0,
            "ms_p99": 2.0 + 0.97 * 6.0,
        }
    )
    assert metrics.take() == {}


def test_every_way_to_have_no_reward_has_its_cause(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ISOLATED)
    spec = find_reward(str(path))
    config = spec.config(name=str(path), timeout_s=1.0, max_failed=1.0)
    with RewardPool(spec, config, workers=1) as pool:
        responses = ("abcde", "hang", "die", "grow", "raise", "nan")
        asyncio.run(pool.score([given(response) for response in responses]))
        metrics = pool.metrics()
    own = {key.removeprefix("reward/odd/"): value for key, value in metrics.items()}
    assert own["answers"] == 6 and own["mean"] == 0.5 and own["none"] == pytest.approx(5 / 6)
    causes = {key.removeprefix("none/") for key in own if key.startswith("none/")}
    assert causes == {"timeout", "died", "memory", "raised", "not_finite"}
    assert own["ms_p50"] <= own["ms_p99"] and own["ms_p99"] > 900
    assert metrics["reward_worker/0/answers"] == 6, "there is one worker"
    assert metrics["reward_worker/0/ms_p50"] == pytest.approx(own["ms_p50"], rel=0.5, abs=5.0)


def test_each_part_and_each_reward_of_a_row_has_figures_of_its_own_and_evaluations_have_none() -> None:
    parts = [{"reward": "exact_match", "name": "whole"}, {"reward": "f1", "weight": 0.5}]
    mix = plugin_config("reward", "mix", {"parts": parts}, section="reward")
    with RewardPool(find_reward("mix"), mix, workers=1) as pool:
        asyncio.run(pool.score([given("1"), given("2")]))
        asyncio.run(pool.score([given("1", uid="eval/math/0.0")]))
        asyncio.run(pool.score([given("1", uid="")]))
        metrics = pool.metrics()
    assert (metrics["reward/whole/mean"], metrics["reward/whole/answers"]) == (0.5, 2)
    assert metrics["reward/f1/none"] == 0.0
    by = plugin_config("reward", "f1", {"by": "kind"}, section="reward")
    with RewardPool(find_reward("f1"), by, workers=1) as pool:
        asyncio.run(pool.score([given("Answer: 1", kind="dapo")]))
        asyncio.run(pool.score([given("1")]))
        assert {key: value for key, value in pool.metrics().items() if key.endswith("mean")} == {
            "reward/dapo/mean": 1.0,
            "reward/f1/mean": 1.0,
            "reward/shadow/mean": 1.0,  # the time of f1
        }


def test_an_async_reward_that_is_late_is_a_timeout() -> None:
    async def slow(given: RewardInput, config: Any) -> float:
        await asyncio.sleep(60.0)
        return 1.0

    spec = replace(find_reward("remote"), name="slow", score=slow)
    config = spec.config(name="slow", timeout_s=0.05, max_failed=1.0)
    with RewardPool(spec, config, workers=1) as pool:
        began = time.monotonic()
        asyncio.run(pool.score([given("1")]))
        assert time.monotonic() - began < 30.0
        assert pool.metrics()["reward/slow/none/timeout"] == 1.0
