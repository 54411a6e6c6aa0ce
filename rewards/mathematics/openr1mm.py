r"""Computes Open-R1-Multimodal's reward: compares answers by math-verify, else by the text in the answer tags.

Source: ``get_openr1mm_rule_based_reward`` of redai-studio/Relax (relax/engine/rewards/openr1mm.py at 6639fb3), from
EvolvingLMMs-Lab/open-r1-multimodal. A response with several ``</think>``, ``<answer>`` or ``</answer>`` is wrong.
Otherwise it is right if math-verify finds the whole response equal to the whole label, or if the texts in the answer
tags are equal. Without tags, the whole text is compared. Older versions of the source do not match tags with a line
break inside.

Departures. An empty label gives no reward. If math-verify computes too long, there is no reward.

Further departures apply unless ``evaluate`` is set. Only the text after the last ``</think>`` is read, and a response
with an unclosed ``<think>`` has no answer. If a response has answer tags, only the text in the tags is read. If this
text has boxes, only the last box is read; its text may also equal the label's text. A number must be the only answer:
it must not be in a list, range, alternative, inequality or denial. A label with several elements, such as "1, 3", is
compared as a list, and a label with LaTeX, such as ``2\sqrt{7}``, as a formula. Without ``$``, math-verify would read
only a single number of such a label. ``28\%`` and ``28%`` are the same text. If the label is a number, a response that
only evaluates to this number is wrong. The hundredth of a percentage is also wrong (`rewards.math`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared
from rewards.math import is_equal, prepare
from rewards.mathematics.boxed import answer_after_thinking, framed, last_boxed, named_answers
from rewards.mathematics.literals import is_longer_list, not_written_out, stands_alone
from rewards.mathematics.no_evaluation import evaluates_no_text

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SEVERAL = re.compile(r"[,;]\s|,(?![0-9]{3}(?![0-9]))|\band\b", re.ASCII)
_LATEX = re.compile(r"\\[A-Za-z]|\^")
_ONCE = ("</think>", "<answer>", "</answer>")
_EMPTY = "answer='' is empty. Give the answer."


@dataclass(frozen=True)
class OpenR1MMConfig(RewardConfig):
    """Holds the settings of the reward. With ``evaluate``, the rule is exactly the source's rule."""

    name: str = "openr1mm"
    evaluate: bool = False


def score(given: RewardInput, config: OpenR1MMConfig) -> RewardOutput:
    """Returns 1 for the right answer, else 0. Returns None for an empty label."""
    wanted = _tagged(given.answer)
    if not wanted:
        return RewardOutput(reward=None, reason=_EMPTY)
    if repeated := [tag for tag in _ONCE if given.response.count(tag) > 1]:
        return RewardOutput(reward=0.0, answer="", why=f"the response has {repeated[0]} several times")
    if config.evaluate:
        found = _tagged(given.response)
        exact = _verified(given.response, given.answer, evaluate=True)[0] or found == wanted
        return RewardOutput(reward=float(exact), exact=exact, answer=found, why=compared(found or None, wanted))
    text = answer_after_thinking(given.response)
    if text is None:
        return RewardOutput(reward=0.0, answer="", why="the response has a <think> that never closes")
    found, why = _tagged(text), ""
    texts = [form.replace("\\%", "%") for form in (wanted, found, last_boxed(framed(found) or "") or "")]
    exact = texts[0] in texts[1:]
    if not exact:
        exact, why = _is_only_answer(text, given.answer, given.row)
    return RewardOutput(reward=float(exact), exact=exact, answer=found, why=why or compared(found or None, wanted))


def _is_only_answer(text: str, label: str, row: Mapping[str, Any]) -> tuple[bool, str]:
    """Returns whether the text after the thinking names the label as its only answer.

    If math-verify finds them equal but the result is False, the second value is the reason.
    """
    tags, wanted = _ANSWER.search(text), _tagged(label)
    counted, inner = (tags[0], tags[1].strip()) if tags else (text, text.strip())
    if "$" not in wanted and _SEVERAL.search(wanted):
        exact, read = _verified(_formula(inner), _formula(wanted), evaluate=False)
    elif "$" not in wanted and _LATEX.search(wanted):
        exact, read = _verified(_formula(inner) if tags else text, _formula(wanted), evaluate=False)
    else:
        exact, read = _verified(counted, label, evaluate=False)
    if not exact:
        return False, ""
    if (boxed := framed(counted)) is not None:
        if not (inner := last_boxed(boxed) or ""):
            return False, "the last box is empty or never closes"
        why = not_written_out(inner, wanted, row)
    else:
        why = not_written_out(read, wanted, row)
    if not why and (is_longer_list(read, wanted) or not stands_alone(read, inner)):
        why = f"{read[:60]!r} is not the only answer"
    return not why, why


def _formula(text: str) -> str:
    return f"${text.replace('$', '')}$"


@evaluates_no_text
def _verified(response: str, label: str, *, evaluate: bool) -> tuple[bool, str]:
    """Returns whether math-verify finds the response equal to the label, and the parsed part of the response."""
    from math_verify import parse, verify

    # As in the source, raise_on_error=False ignores text that math-verify cannot parse.
    found = parse(response, parsing_timeout=None, raise_on_error=False)
    wanted = parse(label, parsing_timeout=None, raise_on_error=False)
    exact = bool(verify(wanted, found, timeout_seconds=None, raise_on_error=False))
    if exact and not evaluate:
        exact = is_equal(wanted, found, evaluate=False)
    return exact, next((text for text in reversed(found) if isinstance(text, str)), "")


def _tagged(text: str) -> str:
    found = _ANSWER.search(text)
    return (found[1] if found else text).strip()


def check_row(row: Mapping[str, Any], config: OpenR1MMConfig) -> None:
    """Raises ValueError for an empty label."""
    if not _tagged(str(row["answer"])):
        raise ValueError(_EMPTY)


SPEC = RewardSpec(
    name="openr1mm",
    shadow="final_answer",
    summary="Open-R1-Multimodal's rule: math-verify, else the text in <answer>",
    config=OpenR1MMConfig,
    score=score,
    isolated=True,
    check_row=check_row,
    right_answers=lambda label, config: [f"<answer>{answer}</answer>" for answer in named_answers(_tagged(label))],
    prepare=prepare,
)
