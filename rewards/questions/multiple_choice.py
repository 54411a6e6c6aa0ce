"""Right or wrong by the text in the answer tags: ``<answer>B</answer>``.

Source: ``get_multiple_choice_reward`` of redai-infra/Relax (relax/engine/rewards/multiple_choice.py at 8888094). The
texts in the first ``<answer>…</answer>`` of response and label, without white space at their ends, are compared; case
counts.

Departures. A label without tags is the answer itself. A response without tags is wrong; where neither side has tags the
source compares two empty texts and finds every response right. An empty label gives no reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared

_EMPTY = "answer='' is empty. Give the right choice."


@dataclass(frozen=True)
class MultipleChoiceConfig(RewardConfig):
    """Holds the settings of the reward."""

    name: str = "multiple_choice"


def score(given: RewardInput, config: MultipleChoiceConfig) -> RewardOutput:
    """Returns 1 if the response's tagged text is the label's, else 0, and None for an empty label."""
    wanted = _label(given.answer)
    if not wanted:
        return RewardOutput(reward=None, reason=_EMPTY)
    found = tagged(given.response)
    exact = found == wanted
    return RewardOutput(reward=float(exact), exact=exact, answer=found or "", why=compared(found, wanted))


def tagged(text: str) -> str | None:
    """Returns the text in the first answer tags, without white space at its ends; None without tags."""
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
    summary="right or wrong by the text in <answer>",
    config=MultipleChoiceConfig,
    score=score,
    check_row=check_row,
)
