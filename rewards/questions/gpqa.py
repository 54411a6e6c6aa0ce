"""Scores multiple choice by letter, with slime's rule for GPQA.

Source: ``compute_gpqa_reward`` of slime (slime/rollout/rm_hub/gpqa.py). Only the text after the last ``</think>`` is
read. The letter is in the last box, else in the last "answer is X" or "X is correct", else in the last "option X" or
"choice: X", else it is the last capital letter that stands alone. Columns of the row: ``choices`` (a list or a mapping;
their letters are A, B, …), ``valid_letters`` (A to J without choices), ``correct_letter``, ``correct_answer`` and
``answer_text``. The label is a letter, the text of a choice, or the number of a choice from 0. A response without a
letter is right if it contains the text of the right choice.

Departures. A letter is a choice only if it is a separate word; the source reads the D of "answer depends" and the I of
"answer is". A small letter is a choice only before punctuation or the end of a line. The pronoun I is never a choice,
and the article A only if the text has no other letter. The source uses the first match of its patterns, reads no box,
and reads unclosed thinking. A label outside of the choices gives no reward. The source searches for its text in the
response. For the label "E" of four choices any word with an e was right. The text of a choice is accepted only if no
other choice occurs in the response. A label of digits is the number of a choice, because data rows store their answers
as text. A letter in a list, alternative or inequality is not a choice: "B or C", "A, B, C, D" and "x <= B" are wrong
for every label.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared
from rewards.mathematics.boxed import answer_after_thinking, framed, last_boxed

_LETTERS = string.ascii_uppercase[:10]
_MARKUP = re.compile(r"</?[a-z]{1,20}>|\\(?:text|math)[a-z]*\s*\{|\\[()\[\]]|[*_`${}~]")
_X = r"""[\s("'\[]*+(?:(?-i:([A-Z]))|([a-z])(?=[\s)"'\]]*(?:[.,;:!?\n]|$)))(?![A-Za-z0-9])"""
_X += r"(?!\s+is\s+(?:not|wrong|incorrect))"
_IS = r"\s*+(?:(?:is|are|be|:|=)\s*+)*+(?:the\s++)?"
_NAMED = tuple(
    re.compile(pattern, re.IGNORECASE | re.ASCII)
    for pattern in (
        rf"\b(?:answer|final\s+(?:option|choice)){_IS}(?:(?:option|choice)\b{_IS})?(?<![A-Za-z]){_X}"
        r"|\b(?-i:([A-Z]))\W{1,3}is\s+(?:the\s+)?correct\b",
        rf"\b(?:option|choice){_IS}(?<![A-Za-z]){_X}",
    )
)
_BOX = re.compile(r"[\s(\[]*([A-Za-z])(?![A-Za-z0-9])", re.ASCII)
_SEPARATOR = r"[\s)\]\"'.]{0,3}(?:[,/;&|]|\b(?:or|and|to)\b|-)[\s(\[\"']{0,3}"
_LIST_BEFORE = re.compile(rf"(?:\b[A-J]{_SEPARATOR}|\b[A-J]\s[(\[]?|[<>≤≥≠]=?\s?|!=\s?|\\(?:le|ge|ne|lt|gt)q?\s?)$")
_LIST_AFTER = re.compile(rf"{_SEPARATOR}[A-J]\b(?!['’]|\s+[a-z])|\s[(\[]?[A-J]\b(?=[\s)]*(?:[.,;]|[A-J]\b|$))")
_NEAR = 12  # number of characters around a letter that show whether it is in a list
_ALONE = re.compile(r"\b([A-Z])\b", re.ASCII)
_SEVERAL = ""  # replaces a letter that is in a list
_WORD_FOLLOWS = re.compile(r"['’]|\s+[a-z]")


@dataclass(frozen=True)
class GpqaConfig(RewardConfig):
    """Holds the settings of the reward."""

    name: str = "gpqa"


@dataclass(frozen=True, kw_only=True)
class _Question:
    """Holds the letters of a question, the right letter, and the texts of the right and of the wrong choices."""

    letters: Sequence[str]
    right: str
    right_texts: Sequence[str]
    other_texts: Sequence[str]


def score(given: RewardInput, config: GpqaConfig) -> RewardOutput:
    """Returns 1 for the right choice, else 0. Returns None for a label outside of the choices."""
    try:
        question = _question(given.row, given.answer)
    except ValueError as error:
        return RewardOutput(reward=None, reason=str(error))
    text = answer_after_thinking(given.response) or ""
    letter = _letter(text, question.letters)
    if letter == _SEVERAL:
        return RewardOutput(reward=0.0, answer="", why="the letter of the answer is one of several")
    if letter is not None:
        exact = letter == question.right
        return RewardOutput(reward=float(exact), exact=exact, answer=letter, why=compared(letter, question.right))
    words = _normalized_words(text)
    exact = any(right_text in words for right_text in question.right_texts) and not any(
        other_text in words for other_text in question.other_texts
    )
    why = f"no letter; the text of choice {question.right} {'occurs alone' if exact else 'does not occur alone'}"
    return RewardOutput(reward=float(exact), exact=exact, answer=question.right if exact else "", why=why)


def _letter(text: str, letters: Sequence[str]) -> str | None:
    """Returns the letter that a text chooses, or None without a letter, or `_SEVERAL` for a letter in a list."""
    box = _MARKUP.sub("", last_boxed(framed(text) or "") or "")
    boxed = _BOX.match(box)
    if boxed is not None and boxed[1].upper() in letters:
        return _SEVERAL if _in_list(box, boxed.start(1), boxed.end(1)) else boxed[1].upper()
    text = _MARKUP.sub(lambda mark: "\n" if mark[0][0] == "<" else "", text.replace("\u00a0", " "))
    for pattern in _NAMED:
        found = [(match, match.lastindex or 0) for match in pattern.finditer(text)]
        named = [
            (match[group].upper(), match.start(group), match.end(group))
            for match, group in found
            if not (match[group] == "I" and _WORD_FOLLOWS.match(text, match.end()))
        ]
        if chosen := [candidate for candidate in named if candidate[0] in letters]:
            letter, start, end = chosen[-1]
            return _SEVERAL if _in_list(text, start, end) else letter
    alone = [match for match in _ALONE.finditer(text) if match[1] in letters]
    sure = [match for match in alone if not (match[1] in "AI" and _WORD_FOLLOWS.match(text, match.end()))]
    if not (standing := sure or [match for match in alone if match[1] == "A"]):
        return None
    last = standing[-1]
    return _SEVERAL if _in_list(text, last.start(), last.end()) else last[1]


def _in_list(text: str, start: int, end: int) -> bool:
    """Returns whether a letter is in a list of letters, an alternative or an inequality."""
    before, behind = text[max(0, start - _NEAR) : start], text[end : end + _NEAR]
    return bool(_LIST_BEFORE.search(before) or _LIST_AFTER.match(behind))


def _question(row: Mapping[str, Any], label: str) -> _Question:
    """Returns the row's choices and its right letter. Raises ValueError if the label is not among the choices."""
    given = row.get("choices") or []
    choices = [str(text) for text in (given.values() if isinstance(given, Mapping) else given)]
    of_row = [str(letter).upper() for letter in row.get("valid_letters") or ()]
    letters = of_row or list(string.ascii_uppercase[: len(choices)] if choices else _LETTERS)
    right = _right_letter(str(row.get("correct_letter") or label).strip(), letters, choices)
    if right is None:
        has = f"the letters {', '.join(letters)}" + (", the choices' texts or their numbers from 0" if choices else "")
        raise ValueError(f"answer={label[:60]!r} is none of {has}. Correct it, or the column choices.")
    texts = {letter: _normalized_words(choice) for letter, choice in zip(letters, choices, strict=False)}
    named = [str(row[key]) for key in ("correct_answer", "answer_text") if row.get(key)]
    rights = {text for text in [texts.get(right, ""), *map(_normalized_words, named)] if text}
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
        if _normalized_words(label) and _normalized_words(choice) == _normalized_words(label):
            return letter
    if label.isascii() and label.isdigit() and len(label) < 3 and int(label) < len(letters):
        return letters[int(label)]
    return None


def _normalized_words(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def check_row(row: Mapping[str, Any], config: GpqaConfig) -> None:
    """Raises ValueError for a label outside of the choices."""
    _question(row, str(row["answer"]))


SPEC = RewardSpec(
    name="gpqa",
    shadow="final_answer",
    summary="right or wrong for a choice by its letter, or by its text",
    config=GpqaConfig,
    score=score,
    check_row=check_row,
)
