"""Reads tool calls as Mistral writes them: [TOOL_CALLS] and a JSON list, or [TOOL_CALLS]NAME[ARGS]{…} for each call."""

from __future__ import annotations

from typing import Any

from relax_core.contracts.tool_use.tool_calls import ToolCall
from relax_core.data.tool_calls.marked_calls import BrokenCall, ReadCalls, Tools, call_of, json_value

_MARK, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read_mistral(text: str, tools: Tools) -> ReadCalls:
    """Returns the calls of a text; the text in front of the first mark and that of broken calls is the content."""
    before, *marked = text.split(_MARK)
    calls: list[ToolCall] = []
    broken: list[str] = []
    content = [before]
    for one in marked:
        was = len(broken)
        try:
            values = _values(one.strip())
        except BrokenCall as error:
            values, broken = [], [*broken, str(error)]
        for value in values:
            try:
                calls.append(call_of(value))
            except BrokenCall as error:
                broken.append(str(error))
        content += [f"{_MARK}{one}"] if len(broken) > was else []
    return ReadCalls(content="".join(content).strip() if marked else text, calls=tuple(calls), broken=tuple(broken))


def _values(body: str) -> list[Any]:
    """Returns the calls behind a mark as JSON values. Raises `BrokenCall`."""
    if body.startswith("["):
        listed = json_value(body)
        if not listed:
            raise BrokenCall(f"The list after {_MARK} has no call.")
        return list(listed)
    name, found, arguments = body.partition(_ARGUMENTS)
    name, _, identity = name.partition(_ID)
    if not found:
        raise BrokenCall(f"A tool call after {_MARK} has no {_ARGUMENTS}.")
    return [{"name": name.strip(), "arguments": json_value(arguments), "id": identity.strip()}]
