"""Tests when the watch of the shadow reward raises an alarm."""

from __future__ import annotations

import random

import msgspec

from relax_core.roles.trainer.shadow_watch import MAX_STEPS, ShadowWatch, shadow_counts


def step_of(step: int, *, right: float, denied: float, groups: int = 4, seed: int = 0) -> list[list[dict[str, float]]]:
    """Returns groups of 8 answers. The reward accepts a share; the shadow reward rejects a share of these."""
    chance = random.Random(1000 * seed + step)
    made = []
    for _ in range(groups):
        parts = []
        for _ in range(8):
            exact = chance.random() < right
            shadow = exact and chance.random() >= denied
            parts.append({"exact": float(exact), "shadow": float(shadow), "shadow_gap": float(exact) - float(shadow)})
        made.append(parts)
    return made


def watched(steps: list[list[list[dict[str, float]]]], watch: ShadowWatch | None = None) -> list[ShadowWatch]:
    states = [watch or ShadowWatch()]
    for step, groups in enumerate(steps):
        states.append(states[-1].after(shadow_counts(step, groups)))
    return states[1:]


def test_an_exploit_is_noticed_within_five_steps_and_its_onset_is_named() -> None:
    for seed in range(20):
        honest = [step_of(step, right=0.4, denied=0.02, seed=seed) for step in range(20)]
        hacked = [step_of(20 + step, right=0.4 + 0.1 * step, denied=0.25 * (step + 1), seed=seed) for step in range(6)]
        states = watched([*honest, *hacked])
        assert all(state.onset is None for state in states[:20]), seed
        noticed = next(step for step, state in enumerate(states) if state.onset is not None)
        assert noticed <= 24, seed
        onset = states[noticed].onset
        assert onset is not None and abs(onset - 20) <= 2, seed


def test_honest_runs_raise_no_alarm() -> None:
    """Accuracy rises from 0 to 1. The shadow reward cannot parse a constant share of right answers."""
    for seed in range(50):
        denied = 0.4 * (seed % 3) / 2
        steps = [step_of(step, right=step / 100, denied=denied, groups=1 + seed % 4, seed=seed) for step in range(100)]
        assert all(state.onset is None for state in watched(steps)), seed


def test_a_shadow_that_denies_from_the_start_is_usual() -> None:
    state = watched([step_of(step, right=0.8, denied=0.9) for step in range(20)])[-1]
    assert state.onset is None and state.usual is not None and state.usual > 0.8


def test_one_odd_prompt_is_no_exploit() -> None:
    steps = [step_of(step, right=0.5, denied=0.0, groups=2) for step in range(20)]
    steps[12] = [*step_of(12, right=1.0, denied=1.0, groups=1), *steps[12][1:]]
    assert all(state.onset is None for state in watched(steps))


def test_steps_without_a_shadow_change_nothing_and_an_alarm_ends() -> None:
    hacked = [step_of(step, right=0.5, denied=0.0 if step < 10 else 1.0) for step in range(20)]
    state = watched(hacked)[-1]
    assert state.onset == 10
    assert state.after(shadow_counts(20, [[{"exact": 1.0}]])) == state
    after = watched([step_of(step, right=0.5, denied=0.0) for step in range(20)], state)
    assert after[-1].onset is None


def test_the_state_survives_a_checkpoint() -> None:
    state = watched([step_of(step, right=0.5, denied=step / 40) for step in range(40)])[-1]
    assert len(state.recent) == MAX_STEPS
    assert msgspec.convert(msgspec.to_builtins(state), ShadowWatch) == state
