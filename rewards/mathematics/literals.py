r"""Distinguishes written numbers ("84") from expressions that only evaluate to a number ("72 + 12").

A reward that compares values accepts "72 + 12" for 84. A model then learns to answer a sum by repeating it: the first
run of Relax with real weights did so within 45 steps. Therefore, if the label is a number or a list of numbers, only
written numbers are right: digits, a decimal number, a reduced fraction, a mixed number, a power of ten or a product
with a power of ten. A sign, a unit, a currency and a percent sign are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

_NOISE = re.compile(r"\\(?:left|right|displaystyle|mathrm|mathbf)(?![A-Za-z])|\\[()\[\],;:! ]|[$*~\s]+")
_MARKUP = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[()\[\],;:! ]|(?<!\\)\$|\*\*|~")
_POWER_OF_UNIT = r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
_UNIT = rf"(?:\\(?:text|mathrm|textbf|mbox)\s*\{{[^{{}}]*\}}|[A-Za-z°²³]{{2,}}+|[mgshLNJWVKCF°](?!\w)){_POWER_OF_UNIT}"
# Possessive quantifiers, because a word could be split into units in exponentially many ways.
_UNITS = re.compile(rf"(?:\s*+(?:{_UNIT}|/(?=\s*{_UNIT})|\^\s*\{{?\s*\\circ\s*\}}?|\\circ|\\degree|\.(?!\d)))*+\s*+")
_CURRENCY = re.compile(r"(?:\\?\$|[€£¥])\s*")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*percent\s*\}|percent\b)")
_INTEGER = r"(?:\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+)"
_POWER = r"10\s*\^\s*(?:\{\s*[+-]?\d+\s*\}|[+-]?\d+)"
_TIMES = r"\s*(?:\\times|\\cdot|×|·|\*|x)\s*"
_FRACTION = r"\\[dt]?frac\s*(?:\{\s*([+-]?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))|(\d+)\s*/\s*(\d+)"
_NUMBER = re.compile(
    rf"[+\-−–]?\s*(?:(?:(?:\d+\s*)?(?:{_FRACTION}))|{_POWER}"
    rf"|(?:\d*\.\d*\\overline\s*\{{\s*\d+\s*\}}|{_INTEGER}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+|{_TIMES}{_POWER})?)",
    re.ASCII,
)
_BRACKETS = (("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"), ("\\{", "\\}"), ("{", "}"))
_BETWEEN = re.compile(r"\s*(?:[,;](?!\d{3}(?!\d))|[,;]\s+|\\cup|\band\b|\\text\s*\{\s*and\s*\})\s*")
_OPERATOR = re.compile(r"[-+*/^=<>]|\\(?:frac|times|cdot|div|sqrt|pm)")
_NEAR = 60  # number of characters around a number that show whether it is the only answer
_MAX_CHARACTERS = 2000  # limit of a literal; a longer text is not a literal


def is_literal(text: str) -> bool:
    r"""Returns whether a text, without a box, is a written number or a list of written numbers.

    Only the last side of an equation is checked: ``x = 84`` and ``72 + 12 = 84`` are literals, ``84 = 72 + 12`` is not.
    """
    if len(text) > _MAX_CHARACTERS:
        return False
    text = _CURRENCY.sub("", _MARKUP.sub(" ", text)) if "$" in text else _MARKUP.sub(" ", text)
    text = text.rpartition("=")[2].strip() if not re.search(r"[<>≤≥≠]|\\(?:leq?|geq?|neq?|lt|gt)\b", text) else text
    return _is_number(text) or any(_is_list(text, *pair) for pair in (*_BRACKETS, ("", "")))


def _is_number(text: str) -> bool:
    text = _CURRENCY.sub("", text, count=1).strip()
    found = _NUMBER.match(text)
    if found is None or not _is_reduced(found.groups()):
        return False
    behind = text[found.end() :]
    percent = _PERCENT.match(behind)
    return _UNITS.fullmatch(behind[percent.end() :] if percent else behind) is not None


def _is_reduced(parts: Sequence[str | None]) -> bool:
    """Returns whether the fraction in a match of `_NUMBER` is reduced. Returns True without a fraction."""
    numbers = [int(part) for part in parts if part is not None]
    if not numbers:
        return True
    above, below = numbers
    return below > 1 and gcd(above, below) == 1


def _is_list(text: str, opening: str, closing: str) -> bool:
    if not (text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing)):
        return False
    parts = _BETWEEN.split(text[len(opening) : len(text) - len(closing)])
    return len(parts) > 1 and all(_is_number(part) for part in parts)


_NOT_ALONE_BEFORE = re.compile(
    r"(?:[<>≤≥≠]=?|!=|\\(?:leq?|geq?|neq?|lt|gt|approx)|\bnot|n't|\b(?:or|and|to|between)"
    r"|[\d)\]}%][\d.]*\s*\$?[,;]|\d\s|\bor\s+[A-Za-z]\s*=)\s*[$\\(]*\s*$"
)
_NOT_ALONE_AFTER = re.compile(
    r"[$\\)%]*\s*(?:[,;]|\bor\b|\band\b|\bto\b)?\s*[$\\(]*-?(?:\d|\\(?:[dt]?frac|sqrt)(?![a-z]))"
)
_NEXT_NUMBER = re.compile(r"(?:[,;]\s|\band\b)[^A-Za-z]{0,8}\d")
_WITHIN_BEFORE = re.compile(r"\d\.?$")  # a number after such a text is part of a longer number
_WITHIN_AFTER = re.compile(r"\.?\d")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")


def stands_alone(found: str, text: str) -> bool:
    """Returns whether ``found``, a number, is the only answer in ``text``.

    True if the number occurs at least once outside of lists, ranges, alternatives, inequalities and denials.
    """
    if found not in text:
        text, found = _THOUSANDS.sub("", text), _THOUSANDS.sub("", found)
    seen = False
    at = text.find(found)
    while at >= 0:
        end = at + len(found)
        before, behind = text[max(0, at - _NEAR) : at], text[end : end + _NEAR]
        if not (_WITHIN_BEFORE.search(before) or _WITHIN_AFTER.match(behind)):
            if not _NOT_ALONE_BEFORE.search(before) and not _NOT_ALONE_AFTER.match(behind):
                return True
            seen = True
        at = text.find(found, max(end, at + 1))
    return not seen  # math-verify may have written the number differently


def is_longer_list(found: str, label: str) -> bool:
    """Returns whether the answer lists several numbers although the label is a single number."""
    return _is_number(_MARKUP.sub(" ", label)) and _NEXT_NUMBER.search(found) is not None


def not_written_out(found: str, label: str, row: Mapping[str, Any]) -> str:
    """Returns the reason why an answer with the label's value is not accepted, or "" if it is accepted.

    ``found`` is the answer as written in the response. ``row`` is the data row: an expression that the prompt contains
    is not accepted.
    """
    if _squeezed(found) == _squeezed(label):
        return ""
    if is_literal(label):
        return "" if is_literal(found) else f"{found[:60]!r} is not written out as a number"
    if _OPERATOR.search(found) and _stands_in(_squeezed(found), _prompt_text(row.get("prompt"))):
        return f"{found[:60]!r} is in the prompt"
    return ""


def _prompt_text(prompt: Any) -> str:
    """Returns the text of a data row's prompt. The prompt is a text or a list of messages."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence):
        return ""
    contents = [message.get("content") for message in prompt if isinstance(message, Mapping)]
    texts = [
        part if isinstance(part, str) else part.get("text")
        for content in contents
        for part in ([content] if isinstance(content, str) else content or ())
        if isinstance(part, str | Mapping)
    ]
    return "\n".join(text for text in texts if isinstance(text, str))


def _squeezed(text: str) -> str:
    return _NOISE.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def _stands_in(part: str, text: str) -> bool:
    """Returns whether ``part``, a text without spaces, occurs in ``text`` without adjacent letters or digits."""
    if not part or len(part) > _MAX_CHARACTERS:
        return False
    pattern = r"(?<!\w)" + r"\s*".join(map(re.escape, part)) + r"(?!\w)"
    return re.search(pattern, _NOISE.sub(" ", text).replace("\\dfrac", "\\frac")) is not None
