"""The reward of `benchmarks.long_tail`: the share of an answer's numbers that have the colour asked for.

    python -m relax_core reward=plugin reward.name=benchmarks/countdown_reward.py reward.cap=1024

An answer that is not the whole countdown, or that was cut, has 0. The part ``counted`` says which answers are it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.countdown_task import CAP, answer_of, check_wish, wish_of
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec


@dataclass(frozen=True)
class CountdownConfig(RewardConfig):
    """Holds the settings of the reward; ``cap`` is rollout.max_new_tokens."""

    name: str = "countdown"
    cap: int = CAP


def check_row(row: Mapping[str, Any], config: CountdownConfig) -> None:
    """Raises ValueError for a prompt that is none of the task, or that asks for a longer answer than the run allows."""
    check_wish(wish_of(str(row["prompt"]))[1] + 1, config.cap)


def score(given: RewardInput, config: CountdownConfig) -> RewardOutput:
    """Returns the share of numbers in the right colour; exact if all are."""
    wanted, said = answer_of(str(given.row["prompt"])).split(), given.response.split()
    counted = given.stopped and [one[:-1] for one in said] == [one[:-1] for one in wanted]
    right = sum(one == other for one, other in zip(said, wanted, strict=False)) if counted else 0
    share = right / len(wanted)
    return RewardOutput(reward=share, exact=share == 1.0, parts={"counted": float(counted)})


SPEC = RewardSpec(
    name="countdown",
    summary="the share of a countdown's numbers in the colour asked for",
    config=CountdownConfig,
    score=score,
    check_row=check_row,
)
