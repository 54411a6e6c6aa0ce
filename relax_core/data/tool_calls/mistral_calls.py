"""Reads tool calls as Mistral writes them: [TOOL_CALLS] and a JSON list, or [TOOL_CALLS]NAME[ARGS]{…} for each call."""

from __future__ import annotations

from relax_core.contracts.tool_use.tool_calls import ToolCall
from relax_core.data.tool_calls.marked_calls import BrokenCall, ReadCalls, call_of, json_value

_MARK, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read_mistral(text: str) -> ReadCalls:
    """Returns the calls of a text; the text in front of the first mark is the content. Raises `BrokenCall`."""
    content, *marked = text.split(_MARK)
    calls: list[ToolCall] = []
    for one in marked:
        body = one.strip()
        if body.startswith("["):
            value = json_value(body)
            if not isinstance(value, list):
                raise BrokenCall(f"What follows {_MARK} is no list of calls.")
            calls += [call_of(call) for call in value]
        else:
            name, found, arguments = body.partition(_ARGUMENTS)
            name, _, identity = name.partition(_ID)
            if not found:
                raise BrokenCall(f"A tool call after {_MARK} has no {_ARGUMENTS}.")
            calls.append(call_of({"name": name.strip(), "arguments": json_value(arguments), "id": identity.strip()}))
    if marked and not calls:
        raise BrokenCall(f"The list after {_MARK} has no call.")
    return ReadCalls(content=content.strip() if marked else text, calls=tuple(calls))
