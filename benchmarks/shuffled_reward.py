"""A control: the reward of reverse_digits with a wrong reference answer, so the model cannot learn the task.

    python -m relax_core reward=plugin reward.name=benchmarks/shuffled_reward.py

``exact`` still counts true answers. If ``exact`` rises in a run with this reward, the run leaks the true answers.
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
    """Returns another answer of the same length. It depends on this answer, but not on its digits."""
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
