"""Computes the weighted sum of rewards. ``reward.parts`` sets their names, weights and settings.

A part is left out of the sum if its ``when`` does not match the row, or if it is ``optional`` and gives no reward. If
any other part gives no reward, the sum is no reward. The first part in the sum decides whether the answer is exact, and
which answer is counted in the majority vote of an evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, reward_parts


@dataclass(frozen=True)
class MixConfig(RewardConfig):
    """Holds the settings of the reward. ``parts`` are the settings of its parts."""

    name: str = "mix"


def combine(given: RewardInput, outputs: Mapping[str, RewardOutput], config: MixConfig) -> RewardOutput:
    """Returns the sum of weight × reward over ``outputs`` (label → output). Without any output there is no reward."""
    used = [(part.weight, outputs[part.label]) for part in reward_parts(config) if part.label in outputs]
    if not used:
        return RewardOutput(reward=None, reason="no part of reward.parts has a reward for this row")
    first = used[0][1]
    total = sum(weight * (output.reward or 0.0) for weight, output in used)
    return RewardOutput(reward=total, exact=first.exact, answer=first.answer)


SPEC = RewardSpec(
    name="mix",
    summary="the weighted sum of other rewards",
    config=MixConfig,
    combine=combine,
)
