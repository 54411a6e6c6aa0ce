r"""Finds the part of a response that holds the answer, and the content of the last ``\boxed{}`` of a text."""

from __future__ import annotations

import re

_BRACES = re.compile(r"[{}]")
_FRAME = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")


def behind_thinking(response: str) -> str | None:
    """Returns the text behind the last ``</think>``, or None if a ``<think>`` in it is not closed."""
    text = response.rpartition("</think>")[2]
    return None if "<think>" in text else text


def framed(text: str) -> str | None:
    r"""Returns a text with each ``\fbox{}`` as ``\boxed{}``; None if it has neither."""
    return _FRAME.sub(r"\\boxed", text) if "box" in text and _FRAME.search(text) else None


def last_boxed(text: str, *, also_without_brace: bool = False) -> str | None:
    r"""Returns the content of the last ``\boxed{}`` of a text, None if it has none or never closes it.

    With ``also_without_brace`` a last ``\boxed`` that no brace follows counts, and has no content.
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
    r"""Returns a reference answer without its ``\boxed{}``, or as it is; None if nothing is left of it."""
    found = last_boxed(label, also_without_brace=True) if "\\boxed" in label else label
    return found or None
