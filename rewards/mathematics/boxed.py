r"""Finds the part of a response that contains the answer, and the content of the last ``\boxed{}`` in a text."""

from __future__ import annotations

import re

_BRACES = re.compile(r"[{}]")
_FINAL_ANSWER = "####"  # a GSM8K label is the worked solution, this mark and the final answer
_NUMBER_WITH_WORDS = re.compile(
    r"(?=.*[^\d.,-])(?:\\?[$€£]\s*)?(-?\d[\d,]*(?:\.\d+)?)(?:\s+(?!pi\b)[A-Za-z]{2,}\.?)*\s*", re.ASCII
)
_FRAME = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")


def answer_after_thinking(response: str) -> str | None:
    """Returns the text after the last ``</think>``, or None if this text has an unclosed ``<think>``."""
    text = response.rpartition("</think>")[2]
    return None if "<think>" in text else text


def framed(text: str) -> str | None:
    r"""Replaces each ``\fbox{}`` by ``\boxed{}``. Returns None if the text has no box."""
    return _FRAME.sub(r"\\boxed", text) if "box" in text and _FRAME.search(text) else None


def last_boxed(text: str, *, also_without_brace: bool = False) -> str | None:
    r"""Returns the content of the last ``\boxed{}`` of a text, or None if the text has no box or does not close it.

    With ``also_without_brace``, the result is None if the last ``\boxed`` has no brace.
    """
    _, opened, behind = text.rpartition("\\boxed" if also_without_brace else "\\boxed{")
    if not opened:
        return None
    if also_without_brace:
        if not behind.startswith("{"):
            return None
        behind = behind[1:]
    depth = 1
    for brace in _BRACES.finditer(behind):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return behind[: brace.start()]
    return None


def boxed_label(label: str) -> str | None:
    r"""Removes ``\boxed{}`` around a reference answer, if any. Returns None if the result is empty."""
    found = last_boxed(label, also_without_brace=True) if "\\boxed" in label else label
    return found or None


def named_answers(label: str) -> list[str]:
    r"""Returns the right answers for a label: its final answer and, for 50%, ``50\%`` or, for "18 dollars", 18."""
    answer = label.rpartition(_FINAL_ANSWER)[2].strip()
    answer = last_boxed(answer) or answer
    answer = answer[1:-1] if len(answer) > 2 and answer[0] == answer[-1] == "$" else answer
    found = _NUMBER_WITH_WORDS.fullmatch(answer)
    forms = [found[1]] if found else [re.sub(r"\\?%$", r"\\%", answer)] if answer.endswith("%") else []
    return [answer, *(form for form in forms if form != answer)]


def boxed_answers(label: str, *, start: str = "") -> list[str]:
    r"""Returns the answers of `named_answers`, each in ``\boxed{}`` after ``start``."""
    return [f"{start}\\boxed{{{answer}}}" for answer in named_answers(label)]
