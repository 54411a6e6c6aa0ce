"""A control: the reward of reverse_digits against a wrong answer, so that nothing about the prompt can be learnt.

    python -m relax_core reward=plugin reward.name=benchmarks/shuffled_reward.py

``exact`` still counts true answers: a run that reaches them with this reward has a leak somewhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec
from rewards.reverse_digits import ReverseDigitsConfig
from rewards.reverse_digits import score as true_score


@dataclass(frozen=True)
class ShuffledConfig(RewardConfig):
    name: str = "shuffled_reward"
    timeout_s: float = 1.0


def other_answer(answer: str) -> str:
    """Another row's answer: as long as this one, fixed by it, and independent of its digits."""
    return "".join(random.Random(answer).choices("0123456789", k=len(answer)))


def score(given: RewardInput, config: ShuffledConfig) -> RewardOutput:
    true_config = ReverseDigitsConfig()
    shuffled = true_score(replace(given, answer=other_answer(given.answer)), true_config)
    return replace(shuffled, exact=true_score(given, true_config).exact)


SPEC = RewardSpec(
    name="shuffled_reward",
    summary="reverse_digits against another row's answer: a control that must not learn",
    config=ShuffledConfig,
    score=score,
)
