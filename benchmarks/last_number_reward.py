"""The reward of `benchmarks.real_model`: 1 if the last number of the response is the reference answer.

    python -m relax_core reward=plugin reward.name=benchmarks/last_number_reward.py [reward.near=true]

With ``near`` a wrong number scores 1 / (1 + |error|), so few groups have equal rewards and are skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec

NUMBER = re.compile(r"-?\d{1,9}")


@dataclass(frozen=True)
class LastNumberConfig(RewardConfig):
    """Holds the settings of the reward."""

    name: str = "last_number"
    timeout_s: float = 1.0
    near: bool = False


def score(given: RewardInput, config: LastNumberConfig) -> RewardOutput:
    """Returns 1 for the right number, and 0 for a response without a number."""
    numbers = NUMBER.findall(given.response)
    if not numbers:
        return RewardOutput(reward=0.0, exact=False)
    distance = abs(int(numbers[-1]) - int(given.answer))
    return RewardOutput(reward=1.0 / (1 + distance) if config.near else float(distance == 0), exact=distance == 0)


SPEC = RewardSpec(
    name="last_number",
    summary="1 if the last number of the response is the reference answer",
    config=LastNumberConfig,
    score=score,
)
