"""Parses the tool calls of a response in the formats of the model families. Start reading at `read_action`."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from relax_core.contracts.env import Action
from relax_core.contracts.tool_calls import ToolCall, ToolSchema, json_type, json_types
from relax_core.contracts.untrusted_values import clean_value, shown

MAX_CHARACTERS = 1 << 20  # most characters of one call; a longer text is not parsed
Tools = Mapping[str, Mapping[str, Any]]  # the JSON schemas of the parameters, by tool name
_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = {"name", "id", "type", "index"}  # keys of a call in addition to its arguments


class BrokenCall(ValueError):
    """A text has the marks of a tool call, but cannot be parsed as a call.

    The error message is written for the model.
    """


@dataclass(frozen=True, kw_only=True)
class ReadCalls:
    """Holds the calls in a text, in order, and the text around them.

    ``broken`` has an error message for each call that cannot be parsed; the text of such a call is part of ``content``.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[str, ...] = ()


def read_between(text: str, *, begin: str, end: str, read: Callable[[str], ToolCall]) -> ReadCalls:
    """Returns the calls that ``read`` parses from the text between each pair of marks.

    A call is broken if its end mark is missing or if ``read`` raises `BrokenCall`.
    """
    calls: list[ToolCall] = []
    broken: list[str] = []
    outside: list[str] = []
    while (at := text.find(begin)) >= 0:
        outside.append(text[:at])
        inner, found, rest = text[at + len(begin) :].partition(end)
        try:
            if not found:
                raise BrokenCall(f"A tool call that begins with {begin} does not end with {end}.")
            calls.append(read(inner))
        except BrokenCall as error:
            broken.append(str(error))
            lost, again, _ = inner.partition(begin)  # the next call may begin before the end of this call
            rest = text[at + len(begin) + len(lost) :] if again else rest
            outside.append(f"{begin}{lost}" if again else f"{begin}{inner}{found}")
        text = rest
    return ReadCalls(content="".join([*outside, text]).strip(), calls=tuple(calls), broken=tuple(broken))


def json_call(text: str) -> ToolCall:
    """Parses a call from a JSON object with a name and an object of arguments. Raises `BrokenCall`."""
    return call_of(json_value(text))


def call_of(value: Any) -> ToolCall:
    """Returns the call in a JSON value; the call's arguments may be JSON text. Raises `BrokenCall`."""
    if not isinstance(value, Mapping):
        raise BrokenCall(f"A tool call is an object with name and arguments, not {_shown(value)}.")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise BrokenCall("A tool call has no name.")
    keys = [key for key in _ARGUMENTS if key in value]
    if unknown_keys := [key for key in value if key not in _CALL_KEYS and key not in keys]:
        raise BrokenCall(
            f"The tool call {name} has the key {_shown(unknown_keys[0])}. Write its values under arguments."
        )
    if len(keys) > 1:
        raise BrokenCall(f"The tool call {name} has both arguments and parameters. Write only arguments.")
    given = value[keys[0]] if keys else {}
    if isinstance(given, str):
        given = json_value(given)
    if not isinstance(given, Mapping):
        raise BrokenCall(f"The {keys[0]} of the tool call {name} are {_shown(given)}, not an object.")
    identity = value.get("id", "")
    return ToolCall(name=name, arguments=dict(given), id=identity if isinstance(identity, str) else "")


def json_value(text: str) -> Any:
    """Returns the value of a JSON text. Raises `BrokenCall`, also for numbers that are not finite."""
    if len(text) > MAX_CHARACTERS:
        raise BrokenCall(f"A tool call has {len(text)} characters, more than {MAX_CHARACTERS}.")
    try:
        return clean_value(json.loads(text, parse_constant=_refuse, parse_float=_finite))
    except (ValueError, RecursionError) as error:
        raise BrokenCall(f"A tool call is not JSON: {error}.") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _shown(value: Any) -> str:
    text = re.sub(r"\s+", " ", shown(value))
    return text if len(text) <= 40 else f"{text[:40]}…"


BEGIN, END = "<tool_call>", "</tool_call>"


def read_hermes(text: str, tools: Tools) -> ReadCalls:
    """Parses calls in the format of Hermes and Qwen3: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""
    return read_between(text, begin=BEGIN, end=END, read=json_call)


_PYTHON_TAG = "<|python_tag|>"
_BEGINS_OBJECT = re.compile(r"""\{\s*(["'])(name|type|parameters|arguments)\1\s*:""")


def read_llama3_json(text: str, tools: Tools) -> ReadCalls:
    """Parses calls in the format of Llama 3.1: the whole response is {"name": …, "parameters": {…}}.

    A JSON object is a call if it has a name and parameters, or the name of a tool; any other object is content. Raises
    `BrokenCall` for a text that has the mark or begins like a call, but cannot be parsed as a call.
    """
    body = text.strip()
    marked = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).strip()
    if not marked and not body.startswith("{"):
        return ReadCalls(content=text)
    try:
        value = json_value(body)
    except BrokenCall:
        if marked or _BEGINS_OBJECT.match(body):
            raise
        return ReadCalls(content=text)
    if not marked and not _is_call(value, tools):
        return ReadCalls(content=text)
    return ReadCalls(content="", calls=(call_of(value),))


def _is_call(value: Any, tools: Tools) -> bool:
    name = value.get("name")
    return isinstance(name, str) and (name in tools or "parameters" in value or "arguments" in value)


_MARK, _MISTRAL_ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read_mistral(text: str, tools: Tools) -> ReadCalls:
    """Parses Mistral's format: [TOOL_CALLS] and a JSON list, or [TOOL_CALLS]NAME[ARGS]{…} for each call.

    The text before the first mark and the text of broken calls are the content.
    """
    before, *marked = text.split(_MARK)
    calls: list[ToolCall] = []
    broken: list[str] = []
    content = [before]
    for marked_text in marked:
        was = len(broken)
        try:
            values = _values(marked_text.strip())
        except BrokenCall as error:
            values, broken = [], [*broken, str(error)]
        for value in values:
            try:
                calls.append(call_of(value))
            except BrokenCall as error:
                broken.append(str(error))
        content += [f"{_MARK}{marked_text}"] if len(broken) > was else []
    return ReadCalls(content="".join(content).strip() if marked else text, calls=tuple(calls), broken=tuple(broken))


def _values(body: str) -> list[Any]:
    """Returns the calls after a mark as JSON values. Raises `BrokenCall`."""
    if body.startswith("["):
        listed = json_value(body)
        if not listed:
            raise BrokenCall(f"The list after {_MARK} has no call.")
        return list(listed)
    name, found, arguments = body.partition(_MISTRAL_ARGUMENTS)
    name, _, identity = name.partition(_ID)
    if not found:
        raise BrokenCall(f"A tool call after {_MARK} has no {_MISTRAL_ARGUMENTS}.")
    return [{"name": name.strip(), "arguments": json_value(arguments), "id": identity.strip()}]


# The errors of Python's parser, including errors for too deep nesting and for invalid characters.
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
# A name with a bracket, followed by a keyword argument, the end of the call, or the end of the text.
_BEGINS_LIST = re.compile(r"\[\s*[A-Za-z_][\w.]*\(\s*([A-Za-z_]\w*\s*=|\)|$)")


def read_pythonic(text: str, tools: Tools) -> ReadCalls:
    """Parses the format of Llama 3.2, Llama 4 and Gemma: a Python list of calls with constants as keyword arguments.

    A list such as ``[add(a=1, b=2)]`` is parsed but never executed. Any other text is content. Raises `BrokenCall` for
    a text that begins like a list of calls but is not Python.
    """
    body = text.strip()
    if not body.startswith("[") or "(" not in body:
        return ReadCalls(content=text)
    if len(body) > MAX_CHARACTERS:
        raise BrokenCall(f"A list of tool calls has {len(body)} characters, more than {MAX_CHARACTERS}.")
    try:
        listed = ast.parse(body, mode="eval").body
    except _UNREADABLE as error:
        if _BEGINS_LIST.match(body):
            raise BrokenCall(f"The list of tool calls is not Python: {error}.") from error
        return ReadCalls(content=text)
    elements = listed.elts if isinstance(listed, ast.List) else []
    calls: list[ToolCall] = []
    broken: list[str] = []
    outside: list[str] = []
    for element in elements:
        try:
            calls.append(_python_call(element))
        except BrokenCall as error:
            broken.append(str(error))
            outside.append(ast.get_source_segment(body, element) or "")
    if not calls and not all(isinstance(element, ast.Call) for element in elements):
        broken.clear()  # such as the pairs [(1, 2), (3, 4)]
    if not calls:
        return ReadCalls(content=text, broken=tuple(broken))
    return ReadCalls(content=", ".join(outside), calls=tuple(calls), broken=tuple(broken))


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise BrokenCall("A tool call is of the form name(key=value), with all arguments by name.")
    arguments: dict[str, Any] = {}
    for argument in node.keywords:
        if argument.arg is None:
            raise BrokenCall("An argument of a tool call has no name.")
        try:
            value = ast.literal_eval(argument.value)
        except _UNREADABLE as error:
            raise BrokenCall(f"The argument {argument.arg} of a tool call is not a constant of Python.") from error
        arguments[argument.arg] = clean_value(_json_like(value))
    return ToolCall(name=ast.unparse(node.func), arguments=arguments)


def _json_like(value: Any) -> Any:
    """Converts a constant of Python to a value that JSON can represent. Raises `BrokenCall`."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and value - value == 0.0:  # excludes infinity and NaN
        return value
    if isinstance(value, list | tuple):
        return [_json_like(element) for element in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _json_like(inner) for key, inner in value.items()}
    raise BrokenCall(f"An argument of a tool call is of type {type(value).__name__}, which JSON does not hold.")


_NUMBERS = frozenset({"integer", "number"})
MAX_INTEGER_DIGITS = 2.0**53  # float64 represents every smaller whole number exactly
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def read_qwen3_coder(text: str, tools: Tools) -> ReadCalls:
    """Parses Qwen3-Coder's and Qwen3.5's format: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>….

    Each value is converted to the type in the tool's schema.
    """
    return read_between(text, begin="<tool_call>", end="</tool_call>", read=partial(_qwen3_coder_call, tools=tools))


def _qwen3_coder_call(inner: str, *, tools: Tools) -> ToolCall:
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
    """Converts an unquoted text to a value of one of the JSON ``types``.

    A text that does not fit the types becomes its JSON value or stays unchanged, and the tool then refuses it. Without
    types, JSON text becomes its value, except a JSON string.
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
    if (
        isinstance(value, float)
        and abs(value) < MAX_INTEGER_DIGITS
        and value.is_integer()
        and types & _NUMBERS == {"integer"}
    ):
        value = int(value)
    taken = "string" not in types or json_type(value) & types
    return value if taken and not isinstance(value, str) else text


def read_nothing(text: str, tools: Tools) -> ReadCalls:
    """Reads no calls."""
    return ReadCalls(content=text)


Reader = Callable[[str, Tools], ReadCalls]
AUTO = "auto"
PARSERS: Mapping[str, Reader] = {
    "hermes": read_hermes,
    "qwen3_coder": read_qwen3_coder,
    "llama3_json": read_llama3_json,
    "pythonic": read_pythonic,
    "mistral": read_mistral,
    "none": read_nothing,
}
# The mark that begins a call, by format; in formats without a mark, a whole response may be a call.
CALL_MARKS = {"hermes": "<tool_call>", "qwen3_coder": "<tool_call>", "mistral": "[TOOL_CALLS]"}
# Texts in a chat template that identify the family's format of calls; the first match counts.
_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", ""),  # GLM's format, which has no parser here
    ("<tool_call>", "hermes"),
    ('"parameters": ', "llama3_json"),
)
_THINK_END = "</think>"


def tool_parser(name: str, *, template: str) -> str:
    """Returns the name of the parser for a model; "auto" detects the parser in the chat template.

    Raises ValueError for an unknown name, and if the template does not show the format.
    """
    if name == AUTO:
        found = next((parser for sign, parser in _SIGNS if sign in template), "")
        if not found:
            raise ValueError(
                "env.tool_parser=auto: the chat template does not show the format of the model's tool calls. Name the "
                f"format: {', '.join(PARSERS)}; or use env.tools_as=text, which uses the format hermes."
            )
        return found
    if name not in PARSERS:
        raise ValueError(f"env.tool_parser={name}: there is no such parser. Use auto, {', '.join(PARSERS)}.")
    return name


def read_calls(text: str, *, parser: str, tools: Sequence[ToolSchema]) -> ReadCalls:
    """Returns the calls of a text and the errors of calls that cannot be parsed.

    It accepts any text without raising.
    """
    functions = [tool["function"] for tool in tools]
    schemas = {function["name"]: function.get("parameters") for function in functions}
    try:
        return PARSERS[parser](
            text, {name: schema if isinstance(schema, Mapping) else {} for name, schema in schemas.items()}
        )
    except BrokenCall as error:
        return ReadCalls(content=text, broken=(str(error),))


def read_action(text: str, *, stopped: bool, parser: str, tools: Sequence[ToolSchema] = ()) -> Action:
    """Converts a response to an action for the env. It accepts any text without raising.

    ``text`` is the response without its stop token, and ``tools`` are the env's tools. The text before the last
    </think> is thinking and is not parsed for calls; the opening tag may be part of the prompt. If at least one call of
    the env's tools can be parsed, the errors of further calls are in ``call_error``. Otherwise all errors are in
    ``parse_error``.
    """
    before, found, after = text.rpartition(_THINK_END)
    thinking = before.partition("<think>")[2] if "<think>" in before else before
    body = after.lstrip("\n") if found else text
    read = read_calls(body, parser=parser, tools=tools)
    names = [tool["function"]["name"] for tool in tools]
    known = tuple(call for call in read.calls if not names or call.name in names)
    errors = list(read.broken)
    if unknown := next((call.name for call in read.calls if call not in known), ""):
        errors.append(f"There is no tool {unknown[:80]!r}. The tools are: {', '.join(names)}.")
    return Action(
        text=text,
        stopped=stopped,
        tool_calls=known or read.calls,
        parse_error="" if known else " ".join(errors),
        call_error=" ".join(errors) if known else "",
        content=read.content if read.calls else body,
        thinking=thinking.strip(),
    )
