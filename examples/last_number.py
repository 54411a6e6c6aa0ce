"""A reward of 1 for an answer that ends and whose last number is the label.

It compares digits and evaluates nothing, so "72 + 12 =" is no answer to "What is 72 + 12?".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)


@dataclass(frozen=True)
class LastNumberConfig(RewardConfig):
    name: str = "last_number"


def score(given: RewardInput, config: LastNumberConfig) -> RewardOutput:
    numbers = _NUMBER.findall(given.response)
    right = given.stopped and bool(numbers) and numbers[-1] == given.answer
    return RewardOutput(reward=float(right), exact=right)


SPEC = RewardSpec(name="last_number", summary="1 if the last number is the label", config=LastNumberConfig, score=score)
