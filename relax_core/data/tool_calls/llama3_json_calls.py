"""Reads tool calls as Llama 3.1 writes them: the whole response is {"name": …, "parameters": {…}}."""

from __future__ import annotations

import re
from typing import Any

from relax_core.data.tool_calls.marked_calls import BrokenCall, ReadCalls, Tools, call_of, json_value

_PYTHON_TAG = "<|python_tag|>"
_BEGINS_CALL = re.compile(r"""\{\s*(["'])(name|type|parameters|arguments)\1\s*:""")


def read_llama3_json(text: str, tools: Tools) -> ReadCalls:
    """Returns the call that a text is; a JSON object that is no call is content.

    An object is a call if it has a name and parameters, or the name of a tool. Raises `BrokenCall` for a text with the
    mark or with the beginning of a call from which no call can be read.
    """
    body = text.strip()
    marked = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).strip()
    if not marked and not body.startswith("{"):
        return ReadCalls(content=text)
    try:
        value = json_value(body)
    except BrokenCall:
        if marked or _BEGINS_CALL.match(body):
            raise
        return ReadCalls(content=text)
    if not marked and not _is_call(value, tools):
        return ReadCalls(content=text)
    return ReadCalls(content="", calls=(call_of(value),))


def _is_call(value: Any, tools: Tools) -> bool:
    name = value.get("name")
    return isinstance(name, str) and (name in tools or "parameters" in value or "arguments" in value)
