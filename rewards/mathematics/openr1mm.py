r"""Right or wrong by the rule of Open-R1-Multimodal: math-verify, else the text in the answer tags.

Source: ``get_openr1mm_rule_based_reward`` of redai-studio/Relax (relax/engine/rewards/openr1mm.py at 6639fb3), which is
that of EvolvingLMMs-Lab/open-r1-multimodal. A response with several ``</think>``, ``<answer>`` or ``</answer>`` is
wrong. It is right if math-verify finds the whole response equal to the whole label, or if the texts in the answer tags
are equal; a side without tags counts as a whole. Older versions take a line break in the tag for no match.

Departures. An empty label gives no reward, and so does math-verify where it computes too long. A label with several
elements, such as "1, 3", is compared as a list, where math-verify reads its last number. ``28\%`` and ``28%`` are the
same text. A response that only evaluates to a label that is a number is wrong, and so is the hundredth of a
percentage; ``evaluate`` restores math-verify's rule (`rewards.math`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared
from rewards.math import is_equal, prepare
from rewards.mathematics.boxed import named_answers
from rewards.mathematics.literals import not_written_out
from rewards.mathematics.no_evaluation import evaluates_no_text

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SEVERAL = re.compile(r"[,;]\s|,(?![0-9]{3}(?![0-9]))|\band\b", re.ASCII)
_ONCE = ("</think>", "<answer>", "</answer>")
_EMPTY = "answer='' is empty. Give the answer."


@dataclass(frozen=True)
class OpenR1MMConfig(RewardConfig):
    """Holds the settings of the reward; ``evaluate`` is that of `rewards.math`."""

    name: str = "openr1mm"
    evaluate: bool = False


def score(given: RewardInput, config: OpenR1MMConfig) -> RewardOutput:
    """Returns 1 for the right answer, else 0, and None for an empty label."""
    wanted = _tagged(given.answer)
    if not wanted:
        return RewardOutput(reward=None, reason=_EMPTY)
    if repeated := [tag for tag in _ONCE if given.response.count(tag) > 1]:
        return RewardOutput(reward=0.0, answer="", why=f"the response has {repeated[0]} several times")
    found, why = _tagged(given.response), ""
    if found.replace("\\%", "%") == wanted.replace("\\%", "%"):
        exact, written = True, wanted
    elif "$" not in wanted and _SEVERAL.search(wanted):
        exact, written = _verified(f"${found.replace('$', '')}$", f"${wanted}$", evaluate=config.evaluate)
    else:
        exact, written = _verified(given.response, given.answer, evaluate=config.evaluate)
    if exact and not config.evaluate and found != wanted:
        why = not_written_out(written, wanted, given.row)
        exact = not why
    return RewardOutput(reward=float(exact), exact=exact, answer=found, why=why or compared(found or None, wanted))


@evaluates_no_text
def _verified(response: str, label: str, *, evaluate: bool) -> tuple[bool, str]:
    """Returns whether math-verify finds a response equal to the label, and the part of it that it read."""
    from math_verify import parse, verify

    # The source takes what math-verify cannot read for nothing, which raise_on_error=False does.
    found = parse(response, parsing_timeout=None, raise_on_error=False)
    wanted = parse(label, parsing_timeout=None, raise_on_error=False)
    exact = bool(verify(wanted, found, timeout_seconds=None, raise_on_error=False))
    if exact and not evaluate:
        exact = is_equal(wanted, found, evaluate=False)
    return exact, next((one for one in reversed(found) if isinstance(one, str)), "")


def _tagged(text: str) -> str:
    found = _ANSWER.search(text)
    return (found[1] if found else text).strip()


def check_row(row: Mapping[str, Any], config: OpenR1MMConfig) -> None:
    """Raises ValueError for an empty label."""
    if not _tagged(str(row["answer"])):
        raise ValueError(_EMPTY)


SPEC = RewardSpec(
    name="openr1mm",
    summary="Open-R1-Multimodal's rule: math-verify, else the text in <answer>",
    config=OpenR1MMConfig,
    score=score,
    isolated=True,
    check_row=check_row,
    right_answers=lambda label, config: [f"<answer>{one}</answer>" for one in named_answers(_tagged(label))],
    prepare=prepare,
)
