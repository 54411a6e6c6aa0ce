"""Reads tool calls as Qwen3-Coder and Qwen3.5 write them, with a tag for the function and one for each parameter.

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from relax_core.contracts.tool_use.tool_calls import ToolCall
from relax_core.contracts.tool_use.tool_schemas import json_type, json_types
from relax_core.data.tool_calls.marked_calls import BrokenCall, ReadCalls, Tools, json_value, read_between

_NUMBERS = frozenset({"integer", "number"})
MOST_WHOLE = 2.0**53  # below it each whole number is a float
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def read_qwen3_coder(text: str, tools: Tools) -> ReadCalls:
    """Returns the calls of a text; each value gets the type that the schema of its tool names."""
    return read_between(text, begin="<tool_call>", end="</tool_call>", read=partial(_call, tools=tools))


def _call(inner: str, *, tools: Tools) -> ToolCall:
    function = _FUNCTION.fullmatch(inner)
    if function is None:
        raise BrokenCall("A tool call is not of the form <function=NAME>…</function>.")
    name = function[1].strip()
    parameters = tools.get(name, {})
    properties = parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, Any] = {}
    body, at = function[2], 0
    while (parameter := _PARAMETER.match(body, at)) is not None:
        key = parameter[1].strip()
        arguments[key] = value_of_text(parameter[2], json_types(properties.get(key), parameters))
        at = parameter.end()
    if body[at:].strip():
        raise BrokenCall("A parameter of a tool call is not of the form <parameter=KEY>VALUE</parameter>.")
    return ToolCall(name=name, arguments=arguments)


def value_of_text(text: str, types: frozenset[str]) -> Any:
    """Returns the value that an unquoted text means, of one of the JSON ``types``.

    A text that means no such value is returned as JSON or as it is, and the tool refuses it. Without types, a text that
    is JSON and no text is that value.
    """
    word = text.strip()
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word == "None" and "null" in types and "string" not in types:
        return None
    try:
        value = json_value(text)
    except BrokenCall:
        return text
    if isinstance(value, float) and abs(value) < MOST_WHOLE and value.is_integer() and types & _NUMBERS == {"integer"}:
        value = int(value)
    taken = "string" not in types or json_type(value) & types
    return value if taken and not isinstance(value, str) else text
