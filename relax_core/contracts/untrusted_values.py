"""Makes untrusted values of plug-ins, data and clients safe: ensures valid UTF-8 and limited nesting, shortens reprs.

A Python string may contain half of a surrogate pair, which cannot be stored or sent as UTF-8. A value may be nested
deeper than the interpreter's recursion limit, and the repr of a value may raise or have gigabytes.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

MAX_DEPTH = 64  # most levels of nested lists and objects in a value
SHOWN = 80  # most characters of an untrusted value in an error
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_DIGITS_A_BIT = math.log10(2)
_LONG_INTEGER_BITS = 256  # an integer with more bits is described by its number of digits
_NESTS = (dict, list, tuple)
_Decoded = TypeVar("_Decoded")


def clean_text(text: str, most: int | None = None) -> str:
    """Returns the first ``most`` characters of a text; U+FFFD replaces each half of a surrogate pair.

    The result is a plain str. A text that is short enough and can be encoded as UTF-8 is not changed.
    """
    text = str(text) if most is None else str(text)[:most]
    return text if text.isascii() else _SURROGATE.sub(_REPLACEMENT, text)


def clean_value(value: Any, *, depth: int = MAX_DEPTH) -> Any:
    """Applies `clean_text` to all texts and keys in a JSON value; other objects are not changed.

    Raises ValueError for lists and objects that are nested more than ``depth`` levels deep.
    """
    if isinstance(value, str):
        return clean_text(value)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth == 0:
        raise ValueError(_too_deep())
    if isinstance(value, Mapping):
        return {
            clean_text(name) if isinstance(name, str) else name: clean_value(inner, depth=depth - 1)
            for name, inner in value.items()
        }
    return [clean_value(element, depth=depth - 1) for element in value]


def check_depth(value: Any, *, depth: int = MAX_DEPTH) -> None:
    """Raises ValueError for lists and dicts that are nested more than ``depth`` levels deep."""
    level = [value] if isinstance(value, _NESTS) else []
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, _NESTS)
        ]
    if level:
        raise ValueError(_too_deep())


def holds_huge_integer(value: Any) -> bool:
    """Returns whether a JSON value has an integer beyond 64 bits, which messages between processes cannot contain."""
    level = [value]
    while level:
        if any(type(element) is int and not -(1 << 63) <= element < 1 << 64 for element in level):
            return True
        level = [
            inner
            for outer in level
            if isinstance(outer, _NESTS)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return False


def decode_json(content: bytes | str, kind: type[_Decoded]) -> _Decoded:
    """Returns the value of a JSON text, checked against the type ``kind``, which may be `typing.Any`.

    Raises ValueError, or its subclass `msgspec.DecodeError`, if the text is not JSON of this type, or if its lists and
    objects are nested more than `MAX_DEPTH` levels deep.
    """
    opening: tuple[Any, Any] = ("[", "{") if isinstance(content, str) else (b"[", b"{")
    try:
        value = msgspec.json.decode(content, type=kind)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    if sum(map(content.count, opening)) > MAX_DEPTH:  # a text with fewer brackets cannot be nested too deeply
        check_depth(value)
    return value


def shown(value: object, most: int = SHOWN) -> str:
    """Describes any object in at most ``most`` characters, even if its repr raises."""
    text = clean_text(_SHORT.repr(value))
    return text if len(text) <= most else f"{text[:most]}…"


def shown_error(error: BaseException, most: int = 2000) -> str:
    """Returns the type and the text of an error of untrusted code; the error's ``__str__`` may raise."""
    try:
        text = str(error)
    except Exception as broken:  # untrusted code may raise anything
        text = f"its text raises {type(broken).__name__}"
    return clean_text(f"{type(error).__name__}: {text}", most)


class _Short(reprlib.Repr):
    """Describes values in a few characters; for a repr that raises, it shows the value's type."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring = self.maxother = self.maxlong = 2 * SHOWN
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 8

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        if bits > _LONG_INTEGER_BITS:  # the interpreter refuses to format thousands of digits
            return f"{'-' if x < 0 else ''}an integer of about {int(bits * _DIGITS_A_BIT) + 1} digits"
        return int.__repr__(x)

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[: self.maxstring])


_SHORT = _Short()


def _too_deep() -> str:
    return f"it is nested more than {MAX_DEPTH} levels deep"
