"""Computes the reward of a multi-turn env: the sum of the turns' rewards."""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec


@dataclass(frozen=True)
class EnvRewardConfig(RewardConfig):
    """Holds the settings of the env reward."""

    name: str = "env"


def score(given: RewardInput, config: EnvRewardConfig) -> RewardOutput:
    """Returns the sum of the turns' rewards. The answer is exact if the sum is 1.

    The sum is 0 if the episode was cut before the env gave a reward. The reward is None if the env ended the episode
    without any reward.
    """
    rewards = [reward for reward in given.turn_rewards if reward is not None]
    if not rewards and given.ended in ("", "env_done"):
        return RewardOutput(reward=None, reason="the env gave no reward: use a reward that scores the conversation")
    why = "turns: " + ", ".join("none" if reward is None else f"{reward:g}" for reward in given.turn_rewards)
    return RewardOutput(reward=sum(rewards), exact=sum(rewards) == 1.0, why=why)


SPEC = RewardSpec(
    name="env",
    summary="the sum of the env's rewards for its turns",
    config=EnvRewardConfig,
    score=score,
    scores_turns=True,
)
