"""Reads tool calls as Hermes and Qwen3 write them: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from __future__ import annotations

from relax_core.data.tool_calls.marked_calls import ReadCalls, Tools, json_call, read_between

BEGIN, END = "<tool_call>", "</tool_call>"


def read_hermes(text: str, tools: Tools) -> ReadCalls:
    """Returns the calls of a text, whose values have the types of JSON."""
    return read_between(text, begin=BEGIN, end=END, read=json_call)
