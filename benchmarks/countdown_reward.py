"""The reward of `benchmarks.long_tail`: the share of the requested numbers that have the requested colour.

    python -m relax_core reward=plugin reward.name=benchmarks/countdown_reward.py reward.cap=1024

The share covers the numbers of all turns. A truncated or incomplete countdown scores 0 for all of its numbers. The
reward part ``counted`` is the share of answers with the complete countdown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.countdown_task import CAP, answer_of, check_wish, prompts_of, wish_of
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec


@dataclass(frozen=True)
class CountdownConfig(RewardConfig):
    """Holds the settings of the reward. ``cap`` is env.max_turn_tokens, or rollout.max_new_tokens for one turn."""

    name: str = "countdown"
    cap: int = CAP


def check_row(row: Mapping[str, Any], config: CountdownConfig) -> None:
    """Raises ValueError for a prompt of another task, or a prompt that requests a longer answer than the run allows."""
    prompts = prompts_of(row)
    key = "env.max_turn_tokens" if len(prompts) > 1 else "rollout.max_new_tokens"
    for prompt in prompts:
        check_wish(wish_of(prompt)[1] + 1, config.cap, key=key)


def score(given: RewardInput, config: CountdownConfig) -> RewardOutput:
    """Returns the share of numbers with the right colour. The answer is exact if all colours are right.

    Only the last turn can be truncated, because a truncated turn ends an episode (env.on_turn_cut=end).
    """
    wanted = [answer_of(prompt).split() for prompt in prompts_of(given.row)]
    said = [text.split() for text in given.turns or [given.response]]
    if not given.stopped:
        said = said[:-1]
    counted = right = 0
    for answer, numbers in zip(said, wanted, strict=False):
        if [token[:-1] for token in answer] == [token[:-1] for token in numbers]:
            counted += 1
            right += sum(token == number for token, number in zip(answer, numbers, strict=True))
    share = right / sum(map(len, wanted))
    return RewardOutput(reward=share, exact=share == 1.0, parts={"counted": counted / len(wanted)})


SPEC = RewardSpec(
    name="countdown",
    summary="the share of a countdown's numbers in the requested colour",
    config=CountdownConfig,
    score=score,
    check_row=check_row,
)
