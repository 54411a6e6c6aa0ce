"""Tests the reward from an env of several turns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from relax_core.contracts.reward import RewardInput
from relax_core.registry import find_reward
from rewards.env import EnvRewardConfig


@pytest.mark.parametrize(
    ("turn_rewards", "ended", "reward", "exact"),
    [
        ([0.0, 1.0], "env_done", 1.0, True),
        ([0.25, None, 0.5], "max_turns", 0.75, False),
        ([None], "turn_cut", 0.0, False),
        ([None, None], "env_done", None, False),
        ([], "", None, False),
        ([1.0], "env_done", 1.0, True),
        ([0.0], "env_done", 0.0, False),
        ([-1.0, 0.5], "env_done", -0.5, False),
        ([2.0, -1.0], "token_budget", 1.0, True),
        ([], "max_turns", 0.0, False),
        ([None, 0.0], "env_done", 0.0, False),
        ([0.25] * 4, "env_done", 1.0, True),
        ([None, None], "context_full", 0.0, False),
    ],
)
def test_the_sum_of_the_turns(
    turn_rewards: Sequence[float | None], ended: str, reward: float | None, exact: bool
) -> None:
    score = find_reward("env").score
    assert score is not None
    given = RewardInput(response="r", stopped=True, answer="", row={}, turn_rewards=turn_rewards, ended=ended)
    output = score(given, EnvRewardConfig())
    assert (output.reward, output.exact) == (reward, exact)  # type: ignore[union-attr]
    assert bool(output.reason) == (reward is None)  # type: ignore[union-attr]
