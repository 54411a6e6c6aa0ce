"""The weighted sum of other rewards, which ``reward.parts`` names with their weights and their own settings.

A part is left out of the sum where its ``when`` does not fit the row, or where it is ``optional`` and has no reward.
Without a reward of any other part there is none at all. The first part that is in the sum says whether the answer is
exact, and which answer an evaluation counts votes for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, reward_parts


@dataclass(frozen=True)
class MixConfig(RewardConfig):
    """Holds the settings of the reward; ``parts`` has its parts."""

    name: str = "mix"


def combine(given: RewardInput, outputs: Mapping[str, RewardOutput], config: MixConfig) -> RewardOutput:
    """Returns the sum of weight × reward over ``outputs``, the parts by label; None without any part."""
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
