"""Reads tool calls as Llama 3.2, Llama 4 and Gemma write them: a Python list of calls with constants by name."""

from __future__ import annotations

import ast
import re
from typing import Any

from relax_core.contracts.checks.foreign_values import clean_value
from relax_core.contracts.tool_use.tool_calls import ToolCall
from relax_core.data.tool_calls.marked_calls import MOST_CHARACTERS, BrokenCall, ReadCalls, Tools

# What the parser of Python raises for a text: nesting that is too deep, and characters that no source may have.
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
# A name with a bracket, and behind it an argument by name, the end of the call, or the end of the text.
_BEGINS_CALL = re.compile(r"\[\s*[A-Za-z_][\w.]*\(\s*([A-Za-z_]\w*\s*=|\)|$)")


def read_pythonic(text: str, tools: Tools) -> ReadCalls:
    """Returns the calls of a text that is a list such as ``[add(a=1, b=2)]``; nothing of it is run.

    Any other text is content. Raises `BrokenCall` for a text that begins like a list of calls and is no Python.
    """
    body = text.strip()
    if not body.startswith("[") or "(" not in body:
        return ReadCalls(content=text)
    if len(body) > MOST_CHARACTERS:
        raise BrokenCall(f"A list of tool calls has {len(body)} characters, more than {MOST_CHARACTERS}.")
    try:
        listed = ast.parse(body, mode="eval").body
    except _UNREADABLE as error:
        if _BEGINS_CALL.match(body):
            raise BrokenCall(f"The list of tool calls is no Python: {error}.") from error
        return ReadCalls(content=text)
    elements = listed.elts if isinstance(listed, ast.List) else []
    calls: list[ToolCall] = []
    broken: list[str] = []
    outside: list[str] = []
    for one in elements:
        try:
            calls.append(_call(one))
        except BrokenCall as error:
            broken.append(str(error))
            outside.append(ast.get_source_segment(body, one) or "")
    if not calls and not all(isinstance(one, ast.Call) for one in elements):
        broken.clear()  # such as the pairs [(1, 2), (3, 4)]
    if not calls:
        return ReadCalls(content=text, broken=tuple(broken))
    return ReadCalls(content=", ".join(outside), calls=tuple(calls), broken=tuple(broken))


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise BrokenCall("A tool call is of the form name(key=value), with all arguments by name.")
    arguments: dict[str, Any] = {}
    for argument in node.keywords:
        if argument.arg is None:
            raise BrokenCall("An argument of a tool call has no name.")
        try:
            value = ast.literal_eval(argument.value)
        except _UNREADABLE as error:
            raise BrokenCall(f"The argument {argument.arg} of a tool call is no constant of Python.") from error
        arguments[argument.arg] = clean_value(_json_like(value))
    return ToolCall(name=ast.unparse(node.func), arguments=arguments)


def _json_like(value: Any) -> Any:
    """Returns a constant of Python as a value that JSON can hold. Raises `BrokenCall`."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and value - value == 0.0:  # neither infinite nor NaN
        return value
    if isinstance(value, list | tuple):
        return [_json_like(one) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _json_like(one) for key, one in value.items()}
    raise BrokenCall(f"An argument of a tool call is of type {type(value).__name__}, which JSON does not hold.")
