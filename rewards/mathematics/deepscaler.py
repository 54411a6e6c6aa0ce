r"""Computes DeepScaleR's math reward: compares the last ``\boxed{}`` after ``</think>`` by MATH's form or by sympy.

Source: ``get_deepscaler_rule_based_reward`` of slime (slime/rollout/rm_hub/deepscaler.py), from
agentica-project/deepscaler. Only the text after the last ``</think>`` is read, or without this tag the text after
``###Response``. A response with neither mark is wrong. The answer must be in the last ``\boxed``. `sympy_equality`
defines equality.

Departures. A label without an answer gives no reward; the source gives 0. If sympy computes too long or needs too much
memory, there is no reward. ``\fbox`` is not a box: the source has code for it that never runs. A response with a
second, unclosed ``<think>`` has no solution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared
from rewards.mathematics.boxed import answer_after_thinking, boxed_answers, boxed_label, last_boxed
from rewards.mathematics.sympy_equality import check_package, is_equal, prepare

_THINKING_ENDS = "</think>"
_RESPONSE = "###Response"


@dataclass(frozen=True)
class DeepScaleRConfig(RewardConfig):
    """Holds the settings of the reward."""

    name: str = "deepscaler"


def score(given: RewardInput, config: DeepScaleRConfig) -> RewardOutput:
    """Returns 1 for the right answer, else 0. Returns None if the label has no answer."""
    wanted = boxed_label(given.answer)
    if wanted is None:
        return RewardOutput(reward=None, reason=_unreadable(given.answer))
    text = _solution(given.response)
    if text is None:
        return RewardOutput(reward=0.0, answer="", why="the response has no </think>")
    found = last_boxed(text, also_without_brace=True)
    exact = found is not None and is_equal(found, wanted)
    return RewardOutput(reward=float(exact), exact=exact, answer=found or "", why=compared(found, wanted))


def _solution(response: str) -> str | None:
    """Returns the text with the answer, or None if the response has no text after the thinking."""
    if _THINKING_ENDS in response:
        return answer_after_thinking(response)
    if _RESPONSE in response:
        return response.split(_RESPONSE)[1]
    return None


def check_row(row: Mapping[str, Any], config: DeepScaleRConfig) -> None:
    """Raises ValueError for a label without an answer."""
    if boxed_label(str(row["answer"])) is None:
        raise ValueError(_unreadable(str(row["answer"])))


def _unreadable(label: str) -> str:
    return f"answer={label[:60]!r} has no answer to compare with. Give the answer, with or without \\boxed{{}}."


def check(config: DeepScaleRConfig) -> None:
    """Raises ValueError if the package that parses LaTeX is missing."""
    check_package(config.name)


SPEC = RewardSpec(
    name="deepscaler",
    shadow="final_answer",
    summary="DeepScaleR's rule: the last box after </think>, by sympy in a killable worker",
    config=DeepScaleRConfig,
    score=score,
    isolated=True,
    check=check,
    check_row=check_row,
    right_answers=lambda label, config: boxed_answers(label, start="<think></think>"),
    prepare=prepare,
)
