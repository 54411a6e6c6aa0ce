"""Right or wrong for a choice by its letter, by the rule of GPQA in slime.

Source: ``compute_gpqa_reward`` of slime (slime/rollout/rm_hub/gpqa.py). Behind the last ``</think>``, the letter is the
one in "answer is X", "option X", "choice: X", then in "X is correct", then in "final answer X", in any case; else the
last capital letter that stands alone. Columns of the row: ``choices`` (a list or a mapping; their letters are A, B, …),
``valid_letters`` (A to J without choices), ``correct_letter``, ``correct_answer`` and ``answer_text``. The label is a
letter, the text of a choice, or the number of a choice from 0. A response without a letter is right if it has the text
of the right choice.

Departures. A label outside of the choices gives no reward, where the source looks for its text in the response, so that
"E" of four choices was right for any word with an e. The text counts only if no other choice occurs in the response. A
label of digits is the number of a choice, because data rows have their answers as text.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared

_LETTERS = string.ascii_uppercase[:10]
_NAMED = (
    re.compile(r"(?:answer|option|choice)\s*(?:(?:is|:)\s*)?((?a:[A-Z]))", re.IGNORECASE),
    re.compile(r"((?a:[A-Z]))\s*is\s*(?:the\s*)?correct", re.IGNORECASE),
    re.compile(r"final\s*(?:answer|option)\s*(?:(?:is|:)\s*)?((?a:[A-Z]))", re.IGNORECASE),
)
_ALONE = re.compile(r"\b([A-Z])\b")


@dataclass(frozen=True)
class GpqaConfig(RewardConfig):
    """Holds the settings of the reward."""

    name: str = "gpqa"


@dataclass(frozen=True, kw_only=True)
class _Question:
    """Holds the letters of a question, its right one, and the texts of the right choice and of the others."""

    letters: Sequence[str]
    right: str
    right_texts: Sequence[str]
    other_texts: Sequence[str]


def score(given: RewardInput, config: GpqaConfig) -> RewardOutput:
    """Returns 1 for the right choice, else 0, and None for a label outside of the choices."""
    try:
        question = _question(given.row, given.answer)
    except ValueError as error:
        return RewardOutput(reward=None, reason=str(error))
    text = given.response.rpartition("</think>")[2]
    letter = _letter(text, question.letters)
    if letter is not None:
        exact = letter == question.right
        return RewardOutput(reward=float(exact), exact=exact, answer=letter, why=compared(letter, question.right))
    words = _words(text)
    exact = any(one in words for one in question.right_texts) and not any(one in words for one in question.other_texts)
    why = f"no letter; the text of choice {question.right} {'occurs alone' if exact else 'does not occur alone'}"
    return RewardOutput(reward=float(exact), exact=exact, answer=question.right if exact else "", why=why)


def _letter(text: str, letters: Sequence[str]) -> str | None:
    for pattern in _NAMED:
        if (named := pattern.search(text)) is not None and named[1].upper() in letters:
            return named[1].upper()
    alone = [one for one in _ALONE.findall(text) if one in letters]
    return alone[-1] if alone else None


def _question(row: Mapping[str, Any], label: str) -> _Question:
    """Returns what the row says of its choices; raises ValueError if the label is none of them."""
    given = row.get("choices") or []
    choices = [str(one) for one in (given.values() if isinstance(given, Mapping) else given)]
    of_row = [str(one).upper() for one in row.get("valid_letters") or ()]
    letters = of_row or list(string.ascii_uppercase[: len(choices)] if choices else _LETTERS)
    right = _right_letter(str(row.get("correct_letter") or label).strip(), letters, choices)
    if right is None:
        has = f"the letters {', '.join(letters)}" + (", the choices' texts or their numbers from 0" if choices else "")
        raise ValueError(f"answer={label[:60]!r} is none of {has}. Correct it, or the column choices.")
    texts = {letter: _words(choice) for letter, choice in zip(letters, choices, strict=False)}
    named = [str(row[key]) for key in ("correct_answer", "answer_text") if row.get(key)]
    rights = {text for text in [texts.get(right, ""), *map(_words, named)] if text}
    return _Question(
        letters=letters,
        right=right,
        right_texts=sorted(rights),
        other_texts=[text for text in texts.values() if text and text not in rights],
    )


def _right_letter(label: str, letters: Sequence[str], choices: Sequence[str]) -> str | None:
    if label.upper() in letters:
        return label.upper()
    for letter, choice in zip(letters, choices, strict=False):
        if _words(label) and _words(choice) == _words(label):
            return letter
    if label.isascii() and label.isdigit() and len(label) < 3 and int(label) < len(letters):
        return letters[int(label)]
    return None


def _words(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def check_row(row: Mapping[str, Any], config: GpqaConfig) -> None:
    """Raises ValueError for a label outside of the choices."""
    _question(row, str(row["answer"]))


SPEC = RewardSpec(
    name="gpqa",
    summary="right or wrong for a choice by its letter, or by its text",
    config=GpqaConfig,
    score=score,
    check_row=check_row,
)
