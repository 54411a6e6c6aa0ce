"""Compares response and reference answer for an exact match, for answers of one word or number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared
from rewards.mathematics.boxed import named_answers


@dataclass(frozen=True)
class ExactMatchConfig(RewardConfig):
    """Holds the settings of the reward. ``timeout_s`` is the limit per answer in seconds."""

    name: str = "exact_match"
    timeout_s: float = 1.0


def score(given: RewardInput, config: ExactMatchConfig) -> RewardOutput:
    """Returns 1 if the response, without white space at its ends, is the reference answer, else 0.

    A stop string that ended the response may be part of the answer or follow the answer. A response that was cut at the
    token limit is never right.
    """
    exact = given.stopped and given.answer.strip() in (given.response.strip(), given.before_stop.strip())
    return RewardOutput(reward=float(exact), exact=exact, why=compared(given.response.strip(), given.answer.strip()))


def check_row(row: Mapping[str, Any], config: ExactMatchConfig) -> None:
    """Raises ValueError for an empty label, because an empty response would match it."""
    if not str(row["answer"]).strip():
        raise ValueError("answer='' is empty. Give the answer.")


SPEC = RewardSpec(
    name="exact_match",
    summary="1 if the response is the answer, else 0",
    config=ExactMatchConfig,
    score=score,
    check_row=check_row,
    right_answers=lambda label, config: named_answers(label)[:1],
)
