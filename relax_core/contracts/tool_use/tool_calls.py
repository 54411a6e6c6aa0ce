"""Defines a tool call, and calls typed Python functions with the arguments of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from relax_core.contracts.tool_use.tool_schemas import arguments_struct


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """Is one call of a tool that a response asks for.

    ``name`` is what the model wrote, plain text that need not be the name of a tool. ``arguments`` holds values that
    JSON can hold. ``id`` is empty unless the model wrote one.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


class ToolMistake(ValueError):
    """The model called a tool that does not exist, or with wrong arguments; the text is meant for the model."""


def call_tool(functions: Sequence[Callable[..., Any]], call: ToolCall) -> Any:
    """Returns what the function with the call's name returns; for an ``async def`` function that is to be awaited.

    Raises `ToolMistake` for an unknown name, and for arguments that are missing, unknown or of another type than the
    function's annotations say. What the function itself raises passes through.
    """
    named = {function.__name__: function for function in functions}
    function = named.get(call.name)
    if function is None:
        raise ToolMistake(f"There is no tool {call.name!r}. The tools are: {', '.join(named)}.")
    kind = arguments_struct(function)
    try:
        given = msgspec.convert(dict(call.arguments), kind)
    except msgspec.ValidationError as error:
        raise ToolMistake(f"Wrong arguments for the tool {call.name}: {error}.") from error
    return function(**{name: getattr(given, name) for name in kind.__struct_fields__})
