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
from typing import Any

from relax_core.contracts.tool_use.tool_calls import ToolCall
from relax_core.data.tool_calls.marked_calls import BrokenCall, ReadCalls, json_value, read_between

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def read_qwen3_coder(text: str) -> ReadCalls:
    """Returns the calls of a text; a value that is JSON and no text becomes that value. Raises `BrokenCall`."""
    return read_between(text, begin="<tool_call>", end="</tool_call>", read=_call)


def _call(inner: str) -> ToolCall:
    function = _FUNCTION.fullmatch(inner)
    if function is None:
        raise BrokenCall("A tool call is not of the form <function=NAME>…</function>.")
    arguments: dict[str, Any] = {}
    body, at = function[2], 0
    while (parameter := _PARAMETER.match(body, at)) is not None:
        arguments[parameter[1].strip()] = _value(parameter[2])
        at = parameter.end()
    if body[at:].strip():
        raise BrokenCall("A parameter of a tool call is not of the form <parameter=KEY>VALUE</parameter>.")
    return ToolCall(name=function[1].strip(), arguments=arguments)


def _value(text: str) -> Any:
    """Returns what a value means: the form does not tell the text 3 from the number 3, and numbers are more common."""
    try:
        value = json_value(text)
    except BrokenCall:
        return text
    return text if isinstance(value, str) else value
