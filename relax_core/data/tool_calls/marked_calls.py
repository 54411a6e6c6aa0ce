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
Tools = Mapping[str, Mapping[str, Any]]  # the JSON schemas of the parameters, by the name of the tool
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = {"name", "id", "type", "index"}  # keys of a call that are no arguments


class BrokenCall(ValueError):
    """A text has the marks of a tool call, but no call can be read from it; the text is meant for the model."""


@dataclass(frozen=True, kw_only=True)
class ReadCalls:
    """Holds the calls in a text, in order, and the text around them.

    ``broken`` says what is wrong with each call that cannot be read; its text is a part of ``content``.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[str, ...] = ()


def read_between(text: str, *, begin: str, end: str, read: Callable[[str], ToolCall]) -> ReadCalls:
    """Returns the calls that ``read`` finds between each pair of marks.

    A call is broken if its mark has no end, and if ``read`` raises `BrokenCall`.
    """
    calls: list[ToolCall] = []
    broken: list[str] = []
    outside: list[str] = []
    while (at := text.find(begin)) >= 0:
        outside.append(text[:at])
        inner, found, rest = text[at + len(begin) :].partition(end)
        try:
            if not found:
                raise BrokenCall(f"A tool call that begins with {begin} does not end with {end}.")
            calls.append(read(inner))
        except BrokenCall as error:
            broken.append(str(error))
            lost, again, _ = inner.partition(begin)  # the next call may begin before the end of this one
            rest = text[at + len(begin) + len(lost) :] if again else rest
            outside.append(f"{begin}{lost}" if again else f"{begin}{inner}{found}")
        text = rest
    return ReadCalls(content="".join([*outside, text]).strip(), calls=tuple(calls), broken=tuple(broken))


def json_call(text: str) -> ToolCall:
    """Returns the call of a JSON object with a name and an object of arguments. Raises `BrokenCall`."""
    return call_of(json_value(text))


def call_of(value: Any) -> ToolCall:
    """Returns the call that a JSON value is; its arguments may be JSON text. Raises `BrokenCall`."""
    if not isinstance(value, Mapping):
        raise BrokenCall(f"A tool call is an object with name and arguments, not {_shown(value)}.")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise BrokenCall("A tool call has no name.")
    keys = [key for key in _ARGUMENTS if key in value]
    if other := [key for key in value if key not in _BESIDE and key not in keys]:
        raise BrokenCall(f"The tool call {name} has the key {_shown(other[0])}. Write its values under arguments.")
    if len(keys) > 1:
        raise BrokenCall(f"The tool call {name} has both arguments and parameters. Write arguments alone.")
    given = value[keys[0]] if keys else {}
    if isinstance(given, str):
        given = json_value(given)
    if not isinstance(given, Mapping):
        raise BrokenCall(f"The {keys[0]} of the tool call {name} are {_shown(given)}, not an object.")
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
