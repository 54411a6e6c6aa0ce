r"""Compares the response's final answer with the label, as written text or number. It evaluates no expressions.

The final answer is the last ``\boxed{}`` after the thinking, else the text in the last ``<answer>`` tags, else the rest
of the line after the last "Answer:" or "####". Without such a mark, the final answer is the last number of the response
if the label is a number, else the last line. Numbers are compared by value: 84 equals 84.0, and 1/2 equals 0.5. Other
texts are compared without case, LaTeX markup, and punctuation at their ends.

This reward is stricter than rewards that compare values or search for the label. It does not accept an expression, a
list of numbers, an alternative, a range, an inequality or a denial as a final answer. It scores only labels that are
numbers or a few words. It shares no code with other rewards. So it can serve as a shadow reward for them
(``reward.shadow``).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared

MAX_WORDS = 5  # limit of words in a label that is not a number
_MAX_CHARACTERS = 60  # limit of a final answer or a label, in characters
_READ = 4_000  # the final answer is searched in this number of characters at the end of a response
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,30})(?:\.\d{1,30})?|\.\d{1,30}"
_NUMBER = re.compile(
    rf"(?:(?P<sign>[-+−])\s?)?(?:[$€£¥]\s?)?(?P<above>{_DIGITS})(?:\s?/\s?(?P<below>\d{{1,30}}))?(?:\s?%)?",
    re.ASCII,
)
_FRACTION = re.compile(r"\\[dt]?frac\{(\d{1,30})\}\{(\d{1,30})\}", re.ASCII)
_UNIT = re.compile(r"\s?[A-Za-z°²³][A-Za-z°²³/ ]{0,30}")
_MARKED = re.compile(r"(?:(?<![a-z])answer\s*(?:is\s*)?:|####)[ \t*]*([^\n]*)", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_MARKUP = re.compile(r"\\(?:text|mathrm|textbf|mathbf|boxed|fbox)\s*(?=\{)|\\[()\[\],;:! ]|[$*`\"'{}]|\\(?=[%$])")
_NO_ANSWER_BEFORE = re.compile(
    r"(?:[<>≤≥≠]=?|\\(?:leq?|geq?|neq?|lt|gt)|\bnot|n't|\b(?:or|and|to|between|than)"
    r"|\d\s*[-+*/^×·÷–]|\d[%.]?\s*[,;:]|\d\s|\))\s*$"
)


@dataclass(frozen=True)
class FinalAnswerConfig(RewardConfig):
    """Holds the settings of the reward."""

    name: str = "final_answer"


def score(given: RewardInput, config: FinalAnswerConfig) -> RewardOutput:
    """Returns 1 if the final answer is the label, else 0. Returns None for a label that this reward cannot compare."""
    label = _label(given.answer)
    if (reason := _unjudged(label)) is not None:
        return RewardOutput(reward=None, reason=reason, cause="label")
    found = _found(given, is_number=_value(label) is not None)
    exact = found is not None and _is_same(found, label)
    return RewardOutput(reward=float(exact), exact=exact, answer=found or "", why=compared(found, label))


def _found(given: RewardInput, *, is_number: bool) -> str | None:
    """Returns the final answer as written in the response, or None if no final answer is found."""
    text = given.response.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    text = text[-_READ:]
    if (boxed := _boxed(text)) is not None:
        return _side(boxed)
    for marked in (_TAGGED, _MARKED):
        if found := marked.findall(text):
            return _side(found[-1])
    if not given.stopped:
        return None
    return _last_number(text) if is_number else _last_words(text)


def _boxed(text: str) -> str | None:
    at = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if at < 0:
        return None
    start = text.index("{", at) + 1
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[start:place]
    return ""


def _side(text: str) -> str:
    """Returns the last side of an equation. Returns any other text unchanged."""
    return text if re.search(r"[<>≤≥≠]|\\(?:leq?|geq?|neq?|lt|gt)", text) else text.rpartition("=")[2].strip()


def _last_number(text: str) -> str | None:
    plain = _without_markup(text)
    found = next(iter(deque(_NUMBER.finditer(plain), maxlen=1)), None)
    if found is None or _NO_ANSWER_BEFORE.search(plain[max(0, found.start() - 20) : found.start()]):
        return None
    behind = plain[found.end() : found.end() + 20]
    return None if re.match(r"\s*[-+*/^×·÷=]", behind) else found[0]


def _last_words(text: str) -> str | None:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    line = _plain(lines[-1])
    _, is_there, behind = line.rpartition(" is ")
    return behind if is_there else line


def _is_same(found: str, label: str) -> bool:
    wanted, value = _value(label), _value(found)
    return value == wanted if wanted is not None else _plain(found) == _plain(label)


def _value(text: str) -> Fraction | None:
    """Returns the value of a text that is a number with or without a unit, or None for any other text."""
    plain = _without_markup(text[:_MAX_CHARACTERS]).strip(" .\n")
    found = _NUMBER.match(plain) if len(text) <= _MAX_CHARACTERS else None
    if found is None:
        return None
    behind = plain[found.end() :]
    if behind and not _UNIT.fullmatch(behind):
        return None
    below, above = int(found["below"] or 1), Fraction(found["above"].replace(",", ""))
    if not below or (below > 1 and (above.denominator > 1 or Fraction(above, below).denominator != below)):
        return None  # 168/2 is an expression, not a number
    return (-1 if found["sign"] in ("-", "−") else 1) * above / below


def _without_markup(text: str) -> str:
    return _MARKUP.sub("", _FRACTION.sub(r"\1/\2", text))


def _plain(text: str) -> str:
    return " ".join(_without_markup(text).casefold().split()).strip(" .!,:;()")


def _label(label: str) -> str:
    label = label.rpartition("####")[2].strip()
    tagged = _TAGGED.findall(label)
    boxed = _boxed(label)
    return (boxed if boxed is not None else tagged[-1] if tagged else label).strip()


def _unjudged(label: str) -> str | None:
    if _value(label) is not None:
        return None
    plain = _plain(label)
    if (
        plain
        and len(label) <= _MAX_CHARACTERS
        and len(plain.split()) <= MAX_WORDS
        and not re.search(r"[\d\\^=]", label)
    ):
        return None
    return f"answer={label[:60]!r} is neither a number nor at most {MAX_WORDS} words; final_answer compares only these"


def check_row(row: Mapping[str, Any], config: FinalAnswerConfig) -> None:
    """Raises ValueError for a label that this reward cannot compare."""
    if (reason := _unjudged(_label(str(row.get("answer", ""))))) is not None:
        raise ValueError(f"{reason}. Use another reward for it, such as math.")


SPEC = RewardSpec(
    name="final_answer",
    summary="1 if the label, written out, is the final answer; a strict shadow reward for other rewards",
    config=FinalAnswerConfig,
    score=score,
    check_row=check_row,
    right_answers=lambda label, config: [f"\\boxed{{{_label(label)}}}"],
)
