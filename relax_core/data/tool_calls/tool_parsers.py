"""Turns a response into what an env sees of it: its tool calls by the parser of a name, and thinking apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from relax_core.contracts.env import Action
from relax_core.contracts.tool_use.tool_schemas import ToolSchema
from relax_core.data.tool_calls.hermes_calls import read_hermes
from relax_core.data.tool_calls.llama3_json_calls import read_llama3_json
from relax_core.data.tool_calls.marked_calls import BrokenCall, ReadCalls, Tools
from relax_core.data.tool_calls.mistral_calls import read_mistral
from relax_core.data.tool_calls.pythonic_calls import read_pythonic
from relax_core.data.tool_calls.qwen3_coder_calls import read_qwen3_coder

Reader = Callable[[str, Tools], ReadCalls]
AUTO = "auto"
PARSERS: Mapping[str, Reader] = {
    "hermes": read_hermes,
    "qwen3_coder": read_qwen3_coder,
    "llama3_json": read_llama3_json,
    "pythonic": read_pythonic,
    "mistral": read_mistral,
    "none": lambda text, tools: ReadCalls(content=text),
}
# What a call begins with in each form; with the other forms a whole response may be a call.
CALL_MARKS = {"hermes": "<tool_call>", "qwen3_coder": "<tool_call>", "mistral": "[TOOL_CALLS]"}
# What a chat template has if its family writes calls in a form; the first that is found counts.
_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", ""),  # GLM's own form, which no parser here reads
    ("<tool_call>", "hermes"),
    ('"parameters": ', "llama3_json"),
)
_THINK_END = "</think>"


def tool_parser(name: str, *, template: str) -> str:
    """Returns the name of the parser for a model, which for "auto" is found in its chat template.

    Raises ValueError for an unknown name, and if the template does not tell the form.
    """
    if name == AUTO:
        found = next((parser for sign, parser in _SIGNS if sign in template), "")
        if not found:
            raise ValueError(
                "env.tool_parser=auto: the chat template does not show in which form the model calls tools. Name it: "
                f"{', '.join(PARSERS)}; or use env.tools_as=text, which asks for the form hermes."
            )
        return found
    if name not in PARSERS:
        raise ValueError(f"env.tool_parser={name}: there is no such parser. Use auto, {', '.join(PARSERS)}.")
    return name


def read_calls(text: str, *, parser: str, tools: Sequence[ToolSchema]) -> ReadCalls:
    """Returns the calls of a text and what is wrong with those that cannot be read; it never raises for any text."""
    functions = [one["function"] for one in tools]
    schemas = {one["name"]: one.get("parameters") for one in functions}
    try:
        return PARSERS[parser](text, {name: one if isinstance(one, Mapping) else {} for name, one in schemas.items()})
    except BrokenCall as error:
        return ReadCalls(content=text, broken=(str(error),))


def read_action(text: str, *, stopped: bool, parser: str, tools: Sequence[ToolSchema] = ()) -> Action:
    """Returns a response as an env sees it; it never raises for any text.

    ``text`` is the response without its stop token, and ``tools`` are the env's tools. What stands in front of the last
    </think> is thinking, in which no call is read; the opening tag may be part of the prompt. Where a call of the env's
    tools can be read, the others stand in ``call_error``.
    """
    before, found, after = text.rpartition(_THINK_END)
    thinking = before.partition("<think>")[2] if "<think>" in before else before
    body = after.lstrip("\n") if found else text
    read = read_calls(body, parser=parser, tools=tools)
    names = [one["function"]["name"] for one in tools]
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
