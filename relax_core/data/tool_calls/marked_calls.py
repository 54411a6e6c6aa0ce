"""Defines what a parser of tool calls returns, and reads calls that stand as JSON objects in a text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from relax_core.contracts.checks.foreign_values import clean_value, shown
from relax_core.contracts.tool_use.tool_calls import ToolCall

MOST_CHARACTERS = 1 << 20  # of one call; a longer text is not read


class BrokenCall(ValueError):
    """A text has the marks of a tool call, but no call can be read from it; the text is meant for the model."""


@dataclass(frozen=True, kw_only=True)
class ReadCalls:
    """Holds the calls in a text, in order, and the text around them."""

    content: str
    calls: tuple[ToolCall, ...] = ()


def read_between(text: str, *, begin: str, end: str, read: Callable[[str], ToolCall]) -> ReadCalls:
    """Returns the calls that ``read`` finds between each pair of marks.

    Raises `BrokenCall` for a mark without its end, and what ``read`` raises.
    """
    calls: list[ToolCall] = []
    outside: list[str] = []
    while (at := text.find(begin)) >= 0:
        outside.append(text[:at])
        inner, found, text = text[at + len(begin) :].partition(end)
        if not found:
            raise BrokenCall(f"A tool call that begins with {begin} does not end with {end}.")
        calls.append(read(inner))
    return ReadCalls(content="".join([*outside, text]).strip(), calls=tuple(calls))


def json_call(text: str, *, arguments: str = "arguments") -> ToolCall:
    """Returns the call of a JSON object with a name and, under the key ``arguments``, an object.

    Raises `BrokenCall`.
    """
    return call_of(json_value(text), arguments=arguments)


def call_of(value: Any, *, arguments: str = "arguments") -> ToolCall:
    """Returns the call that a JSON value is. Raises `BrokenCall`."""
    if not isinstance(value, Mapping):
        raise BrokenCall(f"A tool call is an object with name and {arguments}, not {_shown(value)}.")
    name, given = value.get("name"), value.get(arguments, {})
    if not isinstance(name, str) or not name:
        raise BrokenCall("A tool call has no name.")
    if not isinstance(given, Mapping):
        raise BrokenCall(f"The {arguments} of the tool call {name} are {_shown(given)}, not an object.")
    identity = value.get("id", "")
    return ToolCall(name=name, arguments=dict(given), id=identity if isinstance(identity, str) else "")


def json_value(text: str) -> Any:
    """Returns the value of a JSON text. Raises `BrokenCall`, also for numbers that are not finite."""
    if len(text) > MOST_CHARACTERS:
        raise BrokenCall(f"A tool call has {len(text)} characters, more than {MOST_CHARACTERS}.")
    try:
        return clean_value(json.loads(text, parse_constant=_refuse, parse_float=_finite))
    except (ValueError, RecursionError) as error:
        raise BrokenCall(f"A tool call is not JSON: {error}.") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _shown(value: Any) -> str:
    text = re.sub(r"\s+", " ", shown(value))
    return text if len(text) <= 40 else f"{text[:40]}…"
