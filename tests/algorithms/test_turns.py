"""Compares credit assignment within an episode with values computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from relax_core.contracts.algorithm import AdvantageInputs, GroupTurns
from relax_core.registry import find_algorithm

# Two games of two turns, and a game of one turn. Tokens: 2 + 1, 1 + 2 and 1.
OF_TOKENS = [0, 0, 1, 2, 3, 3, 4]
SAMPLES = [0, 0, 1, 1, 2]
STATES = ["start", "left", "start", "right", "start"]


def group(*, rewards: list[float], mask: list[int] | None = None, **columns: Any) -> AdvantageInputs:
    """Returns the group with these rewards of the turns."""
    of_samples = [sum(r for r, s in zip(rewards, SAMPLES, strict=True) if s == sample) for sample in range(3)]
    return AdvantageInputs(
        rewards=torch.tensor(of_samples),
        lengths=torch.tensor([3, 3, 1]),
        loss_mask=torch.tensor(mask or [1] * 7).bool(),
        sample_ids=torch.tensor([SAMPLES[turn] for turn in OF_TOKENS]),
        turns=GroupTurns(
            of_tokens=torch.tensor(OF_TOKENS),
            samples=torch.tensor(SAMPLES),
            rewards=torch.tensor(rewards, dtype=torch.float64),
            state_keys=STATES,
        ),
        **columns,
    )


def advantages(algorithm: str, inputs: AdvantageInputs, **settings: Any) -> list[float]:
    spec = find_algorithm(algorithm)
    values: list[float] = spec.advantages(inputs, spec.config(**settings)).tolist()
    return values


def test_gigpo_adds_what_a_turn_did_better_than_others_from_its_state() -> None:
    """Game 0 wins in its second turn, game 1 loses, game 2 wins at once.

    The rewards 1, 0, 1 have the mean 2/3, so the episodes have 1/3, -2/3, 1/3. From the start state, the games return
    1/2 (the reward is one turn away), 0 and 1. The mean is 1/2, so the first turns have 0, -1/2, 1/2. There is no other
    comparison, because each second turn begins in a different state.
    """
    inputs = group(rewards=[0.0, 1.0, 0.0, 0.0, 1.0])
    third = 1 / 3
    wanted = [third, third, third, -2 * third - 0.5, -2 * third, -2 * third, third + 0.5]
    assert advantages("dr_grpo", inputs, credit="gigpo", gigpo_gamma=0.5) == pytest.approx(wanted, abs=1e-6)
    doubled = [third, third, third, -2 * third - 1.0, -2 * third, -2 * third, third + 1.0]
    got = advantages("dr_grpo", inputs, credit="gigpo", gigpo_gamma=0.5, gigpo_weight=2.0)
    assert got == pytest.approx(doubled, abs=1e-6)
    # RLOO compares with the mean of the other two games: 3/2 of the distance to the mean of all three.
    got = advantages("rloo", inputs, credit="gigpo", gigpo_gamma=0.5)
    assert got == pytest.approx([1.5 * advantage for advantage in wanted], abs=1e-6)
    # GRPO divides by the std: 1/√3 for the rewards, 1/2 for the returns 1/2, 0, 1.
    std, step_std = 3**-0.5 + 1e-6, 0.5 + 1e-6
    got = advantages("grpo", inputs, credit="gigpo", gigpo_gamma=0.5)
    by_episode = [third, third, third, -2 * third, -2 * third, -2 * third, third]
    by_turn = [0.0, 0.0, 0.0, -0.5, 0.0, 0.0, 0.5]
    assert got == pytest.approx([a / std + b / step_std for a, b in zip(by_episode, by_turn, strict=True)], abs=1e-5)


def test_equal_returns_of_different_rewards_are_equal() -> None:
    """0.1 + 0.2 is not 0.3 in floats. Divided by a std near 0, the difference would become an advantage."""
    inputs = group(rewards=[0.1, 0.2, 0.3, 0.0, 0.3])
    for algorithm in ("grpo", "rloo"):
        got = advantages(algorithm, inputs, credit="gigpo", gigpo_gamma=1.0, normalize_std="group")
        assert got == pytest.approx([0.0] * 7, abs=1e-6)


def test_ppo_has_each_reward_at_the_end_of_its_turn() -> None:
    """With λ = γ = 1 and values of 0, an advantage is the sum of the future rewards."""
    inputs = group(rewards=[0.25, 1.0, -0.5, 2.0, 3.0], values=torch.zeros(7))
    settings = {"gae_lambda": 1.0}
    assert advantages("ppo", inputs, **settings) == pytest.approx([1.25, 1.25, 1.0, 1.5, 2.0, 2.0, 3.0])
    # λ = 0 shows the rewards themselves, at the last token of each turn.
    assert advantages("ppo", inputs, gae_lambda=0.0) == pytest.approx([0.0, 0.25, 1.0, -0.5, 0.0, 2.0, 3.0])


def test_ppo_gives_the_reward_of_a_masked_turn_to_what_led_to_it() -> None:
    """Turn 2 of game 0 and turn 1 of game 1 are masked. No trained turn led to the reward of game 1's first turn."""
    mask = [1, 1, 0, 0, 1, 1, 1]
    inputs = group(rewards=[0.25, 1.0, -0.5, 2.0, 3.0], mask=mask, values=torch.zeros(7))
    got = advantages("ppo", inputs, gae_lambda=0.0)
    assert [value for value, is_trained in zip(got, mask, strict=True) if is_trained] == pytest.approx(
        [0.0, 1.25, 0.0, 2.0, 3.0]
    )
