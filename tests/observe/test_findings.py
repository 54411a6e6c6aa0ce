"""Tests findings about a finished run, and that a healthy run has no findings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from relax_core.observe.summary import findings


def run(rewards: list[float], **same: float) -> dict[int, dict[str, float]]:
    return {step: {"reward": reward, **same} for step, reward in enumerate(rewards)}


def climbs(steps: int, low: float, high: float) -> list[float]:
    return [low + (high - low) * (1 - math.exp(-4 * step / steps)) for step in range(steps)]


def test_a_reward_that_fell_is_told_with_its_best_and_its_last_steps() -> None:
    rewards = [*climbs(60, 0.3, 0.9), *([0.9] * 10), *climbs(40, 0.9, 0.1)]
    (line,) = findings(run(rewards), {})
    best = np.convolve(rewards, np.ones(10) / 10, "valid")
    steps = f"steps {best.argmax()} to {best.argmax() + 9}"
    assert line == f"The reward fell from {best.max():.3f} ({steps}) to {best[-1]:.3f} in the last 10 steps."


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e-3])
@pytest.mark.parametrize("shape", ["flat", "climbs", "dips and comes back", "loses a little"])
def test_noise_and_small_losses_are_no_fall(shape: str, scale: float) -> None:
    """Tries many seeds, because users ignore warnings that also appear in healthy runs."""
    curve = {
        "flat": [0.5] * 200,
        "climbs": climbs(200, 0.3, 0.95),
        "dips and comes back": [*climbs(100, 0.3, 0.9), *([0.4] * 10), *([0.9] * 90)],
        "loses a little": [*climbs(150, 0.3, 0.95), *([0.85] * 50)],
    }[shape]
    for seed in range(50):
        noise = np.random.default_rng(seed).normal(0, 0.04, len(curve))
        rewards = [
            scale * (reward + change - 1.0) for reward, change in zip(curve, noise, strict=True)
        ]  # some rewards are negative
        assert findings(run(rewards), {}) == [], seed


def test_a_fall_is_found_in_noise() -> None:
    for seed in range(50):
        noise = np.random.default_rng(seed).normal(0, 0.04, 140)
        curve = [*climbs(100, 0.3, 0.9), *([0.6] * 40)]
        assert len(findings(run([a + b for a, b in zip(curve, noise, strict=True)]), {})) == 1


def test_a_short_run_has_no_curve() -> None:
    assert findings(run([1.0] * 9 + [0.0] * 10), {}) == []
    assert findings({}, {}) == []
    assert findings(run([math.nan] * 40), {}) == []


def test_held_out_accuracy_that_fell_is_told_where_the_prompts_can_tell() -> None:
    def evaluations(*exact: float, rows: int = 256) -> dict[int, dict[str, float]]:
        return {50 * index: {"exact": value, "reward": value, "rows": rows} for index, value in enumerate(exact)}

    assert findings({}, evaluations(0.22, 0.8, 1.0, 0.91)) == [
        "The held-out accuracy fell from 1.000 at step 100 to 0.910 at step 150."
    ]
    assert findings({}, evaluations(0.22, 0.8, 1.0, 0.98)) == []
    assert findings({}, evaluations(0.22, 1.0, 0.91, rows=16)) == [], "one or two of sixteen prompts"
    assert findings({}, evaluations(0.22, 0.8, 0.91, 1.0)) == []
    assert findings({}, evaluations(1.0)) == []


def test_answers_that_never_end_and_groups_without_signal_are_reported() -> None:
    cut, equal, learnt = (
        findings(run([0.5] * 12, **values), {})
        for values in (
            {"truncated": 1.0, "groups_without_signal": 0.2, "exact": 0.1},
            {"truncated": 0.9, "groups_without_signal": 0.75, "exact": 0.1},
            {"truncated": 0.0, "groups_without_signal": 0.75, "exact": 0.9},
        )
    )
    assert cut == ["No answer of the last 10 steps ended by itself: all were cut at rollout.max_new_tokens."]
    assert equal == [
        "In 75% of the groups of the last 10 steps all rewards were equal, with 10% of the answers right: there was "
        "almost no learning signal."
    ]
    assert learnt == []
    almost = run([0.5] * 12, truncated=1.0)
    almost[11]["truncated"] = 0.99
    assert findings(almost, {}) == []
