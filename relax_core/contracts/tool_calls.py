"""Tool calling: makes the JSON schemas of an environment's tools, and calls the tools for the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

ToolSchema = dict[str, Any]  # {"type": "function", "function": {"name": …, "description": …, "parameters": …}}


def tool_schema(function: Callable[..., Any]) -> ToolSchema:
    """Returns the schema of a function: its name, its docstring, and its parameters.

    Describe a parameter as in ``Annotated[int, "the first factor"]``. Raises ValueError for a function without a
    docstring, and for a parameter without a type or with a type that JSON cannot represent.
    """
    if not (summary := inspect.getdoc(function)):
        raise ValueError(
            f"tool {function.__name__}: it has no docstring, but the model reads the docstring. Write one."
        )
    try:
        (shape,), named = msgspec.json.schema_components([arguments_struct(function)], ref_template="#/$defs/{name}")
    except TypeError as error:
        raise ValueError(f"tool {function.__name__}: {error}. Use types that JSON can hold.") from error
    parameters = named.pop(shape["$ref"].rsplit("/", 1)[1])
    parameters = {key: parameters[key] for key in ("type", "properties", "required") if key in parameters}
    if named:
        parameters["$defs"] = named
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": summary, "parameters": parameters},
    }


@lru_cache(maxsize=256)
def arguments_struct(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """Returns a type with the parameters of a function as fields, with their types and defaults.

    Raises ValueError as `tool_schema` does.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ValueError(f"tool {function.__name__}: {error} in the type of a parameter. Import it.") from error
    fields: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(
                f"tool {function.__name__}: its parameter {name} cannot be passed by name. Use named parameters."
            )
        if name not in hints:
            raise ValueError(f"tool {function.__name__}: its parameter {name} has no type. Annotate it.")
        kind = _described(hints[name])
        fields.append((name, kind) if parameter.default is parameter.empty else (name, kind, parameter.default))
    return msgspec.defstruct(f"{function.__name__}_arguments", fields, kw_only=True, forbid_unknown_fields=True)


def _described(hint: Any) -> Any:
    if get_origin(hint) is not Annotated:
        return hint
    kind, *notes = get_args(hint)
    texts = [note for note in notes if isinstance(note, str)]
    return Annotated[kind, msgspec.Meta(description=texts[0])] if texts else kind


def json_types(schema: Any, whole: Mapping[str, Any]) -> frozenset[str]:
    """Returns the JSON types that a value of ``schema`` may have; empty if the schema names no type.

    ``whole`` is the schema that defines references such as #/$defs/NAME. ``schema`` and ``whole`` may be malformed.
    """
    found: set[str] = set()
    left, looked_up = [schema], set[str]()
    while left:
        part = left.pop()
        if not isinstance(part, Mapping):
            continue
        named = part.get("type")
        found.update(
            type_name for type_name in (named if isinstance(named, list) else [named]) if isinstance(type_name, str)
        )
        if not named:
            values = part.get("enum", [part["const"]] if "const" in part else [])
            found.update(*(json_type(value) for value in values if isinstance(values, list)))
        for key in ("anyOf", "oneOf", "allOf"):
            left += part[key] if isinstance(part.get(key), list) else []
        if isinstance(reference := part.get("$ref"), str) and reference not in looked_up:
            looked_up.add(reference)
            target: Any = whole
            for key in reference.removeprefix("#/").split("/"):
                target = target.get(key) if isinstance(target, Mapping) else None
            left.append(target)
    return frozenset(found)


def json_type(value: Any) -> frozenset[str]:
    """Returns the JSON types of a value; an integer has the types "integer" and "number"."""
    if isinstance(value, bool | None):
        return frozenset({"null" if value is None else "boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float | str):
        return frozenset({"string" if isinstance(value, str) else "number"})
    return frozenset({"array" if isinstance(value, list) else "object"})


def checked_schemas(tools: Sequence[ToolSchema | Callable[..., Any]]) -> list[ToolSchema]:
    """Returns the schemas of an env's tools.

    Raises ValueError for a wrong schema and for two tools with the same name.
    """
    schemas = [tool_schema(tool) if callable(tool) else tool for tool in tools]
    names: list[str] = []
    for schema in schemas:
        inner = schema.get("function") if isinstance(schema, dict) else None
        name = inner.get("name") if isinstance(inner, dict) else None
        if not isinstance(name, str) or not name or not isinstance(inner.get("parameters", {}), dict):  # type: ignore[union-attr]
            raise ValueError(
                f"tool {str(schema)[:80]}: wanted a typed function, or "
                '{"type": "function", "function": {"name": text, "description": text, "parameters": JSON schema}}.'
            )
        if name in names:
            raise ValueError(f"tool {name}: two tools have this name. Rename one, because calls have only the name.")
        names.append(name)
    return schemas


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """Holds one tool call of a response.

    ``name`` is the name that the model wrote; such a tool may not exist. ``arguments`` contains JSON values. ``id`` is
    the id that the model wrote, or empty.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


class ToolMistake(ValueError):
    """The model called a tool that does not exist, or used wrong arguments. The text is written for the model."""


def call_tool(functions: Sequence[Callable[..., Any]], call: ToolCall) -> Any:
    """Calls the function with the call's name and returns its result; an ``async def`` function returns an awaitable.

    Raises `ToolMistake` for an unknown tool name, and for arguments that are missing, unknown or do not match the
    function's annotations. Exceptions that the function raises are not caught.
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
