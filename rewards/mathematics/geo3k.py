r"""Computes verl's reward for Geometry3k: 0.9 for the right answer and 0.1 for the form.

Source: ``compute_score`` of verl (verl/utils/reward_score/geo3k.py) with the package mathruler. The answer is the last
``\boxed{}``. The source compares it by mathruler's ``grade_answer``; `sympy_equality` has the same rule. The form is
right if the whole response is ``<think>…</think>…\boxed{…}…``.

Departures. A response without a box is wrong; the source compares the word "None" and so rewards it for the label
"None". An empty label gives no reward. If sympy computes too long, there is no reward. A box inside the thinking or
after an unclosed ``<think>`` is not an answer. The rule for the form is the source's rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared
from rewards.mathematics.boxed import answer_after_thinking, boxed_answers, last_boxed
from rewards.mathematics.sympy_equality import check_package, is_equal, prepare

_EMPTY = "answer='' is empty. Give the answer."


@dataclass(frozen=True)
class Geo3kConfig(RewardConfig):
    """Holds the settings of the reward.

    ``format_score`` is the weight of the form, and 1 - ``format_score`` the weight of the answer.
    """

    name: str = "geo3k"
    format_score: float = 0.1


def score(given: RewardInput, config: Geo3kConfig) -> RewardOutput:
    """Returns the weighted sum of the parts ``right`` and ``form``. It is exact if the answer is right."""
    if not given.answer:
        return RewardOutput(reward=None, reason=_EMPTY)
    found = last_boxed(answer_after_thinking(given.response) or "")
    exact = found is not None and is_equal(found.strip(), given.answer, percent_signs=True)
    parts = {"right": float(exact), "form": float(has_form(given.response))}
    return RewardOutput(
        reward=(1.0 - config.format_score) * parts["right"] + config.format_score * parts["form"],
        exact=exact,
        parts=parts,
        answer=(found or "").strip(),
        why=f"{compared(found, given.answer)}, the form is {'right' if parts['form'] else 'wrong'}",
    )


def has_form(response: str) -> bool:
    r"""Returns whether a response is ``<think>…</think>…\boxed{…}…``."""
    at = 0 if response.startswith("<think>") else -1
    for mark in ("<think>", "</think>", "\\boxed{", "}"):
        if at < 0:
            return False
        at = response.find(mark, at)
        at = at if at < 0 else at + len(mark)
    return at >= 0


def check_row(row: Mapping[str, Any], config: Geo3kConfig) -> None:
    """Raises ValueError for an empty label."""
    if not str(row["answer"]):
        raise ValueError(_EMPTY)


def check(config: Geo3kConfig) -> None:
    """Raises ValueError if ``format_score`` is outside of [0, 1], or if the package that parses LaTeX is missing."""
    if not 0 <= config.format_score <= 1:
        raise ValueError(f"reward.format_score={config.format_score}: a share, from 0 to 1.")
    check_package(config.name)


SPEC = RewardSpec(
    name="geo3k",
    shadow="final_answer",
    summary="verl's rule for Geometry3k: 0.9 for the boxed answer, 0.1 for the form",
    config=Geo3kConfig,
    score=score,
    isolated=True,
    check=check,
    check_row=check_row,
    right_answers=lambda label, config: boxed_answers(label),
    prepare=prepare,
)
