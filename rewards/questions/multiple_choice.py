"""Scores multiple choice by the text in the answer tags: ``<answer>B</answer>``.

Source: ``get_multiple_choice_reward`` of redai-infra/Relax (relax/engine/rewards/multiple_choice.py at 8888094). It
compares the texts in the first ``<answer>…</answer>`` of response and label. White space at the ends is removed; case
matters.

Departures. A label without tags is the answer itself. A response without tags is wrong. If response and label have no
tags, the source compares two empty texts and so accepts every response. An empty label gives no reward. Only the text
after the last ``</think>`` is read, and a response with an unclosed ``<think>`` has no answer. A response with
different texts in several answer tags is wrong; the source uses the first text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared
from rewards.mathematics.boxed import answer_after_thinking

_EMPTY = "answer='' is empty. Give the right choice."


@dataclass(frozen=True)
class MultipleChoiceConfig(RewardConfig):
    """Holds the settings of the reward."""

    name: str = "multiple_choice"


def score(given: RewardInput, config: MultipleChoiceConfig) -> RewardOutput:
    """Returns 1 if the response's tagged text equals the label's, else 0. Returns None for an empty label."""
    wanted = _label(given.answer)
    if not wanted:
        return RewardOutput(reward=None, reason=_EMPTY)
    text = answer_after_thinking(given.response) or ""
    found = tagged(text)
    if has_several(text):
        return RewardOutput(reward=0.0, answer="", why="the response has several answers in tags")
    exact = found == wanted
    return RewardOutput(reward=float(exact), exact=exact, answer=found or "", why=compared(found, wanted))


def has_several(text: str) -> bool:
    """Returns whether the answer tags of a text have different contents."""
    return len(set(tagged_texts(text))) > 1


def tagged_texts(text: str) -> list[str]:
    """Returns the texts in answer tags, without white space at their ends."""
    return [part.partition("</answer>")[0].strip() for part in text.split("<answer>")[1:] if "</answer>" in part]


def tagged(text: str) -> str | None:
    """Returns the text in the first answer tags without white space at its ends, or None without tags."""
    _, opened, behind = text.partition("<answer>")
    inner, closed, _ = behind.partition("</answer>")
    return inner.strip() if opened and closed else None


def _label(label: str) -> str:
    found = tagged(label)
    return label.strip() if found is None else found


def check_row(row: Mapping[str, Any], config: MultipleChoiceConfig) -> None:
    """Raises ValueError for an empty label."""
    if not _label(str(row["answer"])):
        raise ValueError(_EMPTY)


SPEC = RewardSpec(
    name="multiple_choice",
    shadow="final_answer",
    summary="right or wrong by the text in <answer>",
    config=MultipleChoiceConfig,
    score=score,
    check_row=check_row,
)
