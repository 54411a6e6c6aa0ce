"""Reads the verdict in a judge's text: the whole of it, and never a digit inside of something longer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

Parser = Callable[[str, bool], float | None]  # a judge's text, and whether it was cut → the verdict, None if unreadable

# What words mean. A, B and tie say which of two answers is the better one.
WORDS = {
    **dict.fromkeys(("yes", "true", "right", "correct", "pass", "a"), 1.0),
    **dict.fromkeys(("no", "false", "wrong", "incorrect", "fail", "b"), 0.0),
    "tie": 0.5,
}
# The forms of what `verdict_parser` takes, with what they mean.
DESCRIPTIONS = {
    "number LOW..HIGH": "the judge's whole text is a number in this range, which becomes 0 to 1",
    "'(?P<verdict>…)'": f"a regular expression; its group verdict is a number or one of {', '.join(WORDS)}",
}
_THOUGHT = "</think>"
_RANGE = re.compile(r"number\s+(-?[0-9]+(?:\.[0-9]+)?)\.\.(-?[0-9]+(?:\.[0-9]+)?)")
_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?")
_BEFORE = re.compile(r"(?:[\w.+/-]|\d[,:])\Z")  # characters that make what follows a part of something longer
_BEHIND = re.compile(r"^(?:[\w%]|[.,/:-]\w)")


def verdict_parser(parse: str) -> Parser:
    """Returns the parser that ``parse`` describes: "number LOW..HIGH", or a regular expression.

    A number is the whole text of the judge and lies in the range, which becomes 0 to 1. The last match of an expression
    counts, and its group "verdict" is a number or one of `WORDS`. What a judge writes before </think> does not count. A
    verdict at the end of a text that was cut is not read, because it may be longer.

    Raises ValueError for a description that is neither.
    """
    if parse.startswith("number"):
        return _number_parser(parse)
    try:
        pattern = re.compile(parse)
    except re.error as error:
        raise ValueError(f"{parse!r} is no regular expression: {error}. See Python's module re.") from error
    if "verdict" not in pattern.groupindex:
        raise ValueError(
            f"{parse!r} has no group of the name verdict. Write such as '(?P<verdict>yes|no)', or 'number 0..10'."
        )
    return lambda text, is_cut: _by_pattern(pattern, text, is_cut=is_cut)


def _number_parser(parse: str) -> Parser:
    found = _RANGE.fullmatch(parse.strip())
    if found is None or float(found[1]) >= float(found[2]):
        raise ValueError(f"{parse!r} is no range of numbers. Write such as 'number 0..10'.")
    low, high = float(found[1]), float(found[2])

    def read(text: str, is_cut: bool) -> float | None:
        said = _conclusion(text)
        if said is None or is_cut or not _NUMBER.fullmatch(said) or not low <= float(said) <= high:
            return None
        return (float(said) - low) / (high - low)

    return read


def _by_pattern(pattern: re.Pattern[str], text: str, *, is_cut: bool) -> float | None:
    said = _conclusion(text)
    matches = list(pattern.finditer(said)) if said is not None else []
    if said is None or not matches or matches[-1]["verdict"] is None:
        return None
    start, end = matches[-1].span("verdict")
    if _BEFORE.search(said[:start]) or _BEHIND.search(said[end:]) or (is_cut and not said[end:].strip()):
        return None
    return _value(said[start:end])


def _conclusion(text: str) -> str | None:
    """Returns what follows the judge's thoughts, or None if these did not end."""
    said = text.rpartition(_THOUGHT)[2].strip()
    return None if "<think>" in said else said


def _value(said: str) -> float | None:
    word = said.strip().lower()
    if _NUMBER.fullmatch(word):
        return float(word) if math.isfinite(float(word)) else None
    return WORDS.get(word)
