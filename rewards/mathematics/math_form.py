r"""Computes the normal form of MATH answers: one notation for fractions, roots, degrees and units.

Source: Hendrycks' ``math_equivalence``, which prm800k, DeepScaleR, verl and other projects also use.
"""

from __future__ import annotations

import re

_REPLACED = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)
_UNIT = "\\text{ "  # a text that begins with a space is a unit


class _Unreadable(Exception):
    """The text has no normal form. It is then compared unchanged."""


def math_form(answer: str, *, percent_signs: bool = False) -> str:
    r"""Returns the normal form of an answer, or the unchanged answer if it has no normal form.

    ``\%`` is always removed, and ``%`` only with ``percent_signs``.
    """
    answer = answer.strip()
    if (whole := re.search(r"^\\text\{(.+?)\}$", answer)) is not None:
        answer = whole[1].strip()
    try:
        return _normal(answer, percent_signs=percent_signs)
    except _Unreadable:
        return answer


def _normal(text: str, *, percent_signs: bool) -> str:
    for old, new in _REPLACED:
        text = text.replace(old, new)
    text, *units = text.split(_UNIT)
    if len(units) > 1:
        raise _Unreadable
    text = text.replace("\\%", "")
    if percent_signs:
        text = text.replace("%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    name, sign, value = text.partition("=")
    if sign and "=" not in value and len(name) <= 2 and not set(name) & set("<>!~"):
        text = value
    text = _fractions(_roots(text).replace(" ", ""))
    return _slash(r"\frac{1}{2}" if text == "0.5" else text)


def _roots(text: str) -> str:
    r"""Replaces ``\sqrt3`` by ``\sqrt{3}``."""
    first, *rest = text.split("\\sqrt")
    if "" in rest:
        raise _Unreadable
    return first + "".join("\\sqrt" + (piece if piece[0] == "{" else f"{{{piece[0]}}}{piece[1:]}") for piece in rest)


def _fractions(text: str) -> str:
    r"""Replaces ``\frac12`` and ``\frac1{2}`` by ``\frac{1}{2}``. Returns the text unchanged if a part is missing."""
    first, *rest = text.split("\\frac")
    parts = [first]
    for piece in rest:
        if not piece:
            raise _Unreadable
        if piece[0] == "{":
            parts.append(piece)
        elif len(piece) < 2:
            return text
        else:
            below = piece[1:] if piece[1] == "{" else f"{{{piece[1]}}}{piece[2:]}"
            parts.append(f"{{{piece[0]}}}{below}")
    return "\\frac".join(parts)


def _slash(text: str) -> str:
    r"""Replaces ``1/2`` by ``\frac{1}{2}``. Returns any other text unchanged."""
    above, sign, below = text.partition("/")
    if not sign or not _is_written_int(above) or not _is_written_int(below):
        return text
    return f"\\frac{{{above}}}{{{below}}}"


def _is_written_int(text: str) -> bool:
    return re.fullmatch(r"0|-?[1-9][0-9]*", text) is not None
