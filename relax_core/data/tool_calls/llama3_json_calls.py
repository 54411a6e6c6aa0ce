"""Reads tool calls as Llama 3.1 writes them: the whole response is {"name": …, "parameters": {…}}."""

from __future__ import annotations

from relax_core.data.tool_calls.marked_calls import ReadCalls, call_of, json_value

_PYTHON_TAG = "<|python_tag|>"


def read_llama3_json(text: str) -> ReadCalls:
    """Returns the call that a text is, if it begins with the mark or as a JSON object. Raises `BrokenCall`."""
    body = text.strip()
    marked = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).strip()
    if not marked and not body.startswith("{"):
        return ReadCalls(content=text)
    value = json_value(body)
    key = "arguments" if isinstance(value, dict) and "arguments" in value else "parameters"
    return ReadCalls(content="", calls=(call_of(value, arguments=key),))
