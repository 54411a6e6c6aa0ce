"""Checks that a chat template shows tools, and shows them as plain text where it does not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.contracts.env import Message
from relax_core.contracts.tool_calls import ToolSchema
from relax_core.data.tokenizer import PromptTokenizer

_TOOL, _ABOUT, _VALUE = "relax_probe_tool", "RelaxProbeAbout", "RelaxProbeValue"
_RESULT, _ID = "RelaxProbeResult", "probe0000"
_PROBE: ToolSchema = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": _ABOUT,
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]},
    },
}
_ASKED: Message = {"role": "user", "content": "RelaxProbeQuestion"}
_HOW = (
    'To call a tool, write <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>; its result follows in '
    "<tool_response></tool_response>."
)


def check_template_shows_tools(tokenizer: PromptTokenizer) -> None:
    """Raises ValueError if the chat template leaves out tools, a call of one, or its result.

    A model would be trained on questions whose tools it never saw. Many templates leave them out without an error.
    """
    shown = tokenizer.render([_ASKED], tools=[_PROBE])
    if _TOOL not in shown or _ABOUT not in shown:
        raise _left_out("the tools of env.name")
    problem: ValueError | None = None
    for arguments in ({"value": _VALUE}, json.dumps({"value": _VALUE})):
        call = {"id": _ID, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "name": _TOOL, "tool_call_id": _ID, "content": _RESULT}
        try:
            whole = tokenizer.render([_ASKED, answer, result], tools=[_PROBE])
        except ValueError as error:
            problem = problem or error
            continue
        behind = whole.partition(_ASKED["content"])[2]
        if _TOOL not in behind or _VALUE not in behind:
            raise _left_out("the call of a tool")
        if _RESULT not in behind:
            raise _left_out("the result of a tool")
        return
    raise _left_out("the call of a tool") from problem


def _left_out(what: str) -> ValueError:
    return ValueError(
        f"env.tools_as=template: the chat template of model.path leaves out {what}. Use env.tools_as=text, which shows "
        "tools and results as plain text, or another model."
    )


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """Returns a conversation whose system message describes the tools and how to call them."""
    about = "\n".join(["# Tools", *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools), _HOW])
    first, *rest = messages
    if first["role"] != "system":
        return [{"role": "system", "content": about}, *messages]
    content: Any = first["content"]
    if isinstance(content, str):
        return [{**first, "content": f"{content}\n\n{about}"}, *rest]
    return [{**first, "content": [*content, {"type": "text", "text": f"\n\n{about}"}]}, *rest]


def with_results_as_text(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns messages in which the results of tools are texts of the user; adjacent results share a message."""
    found: list[Message] = []
    joins = False  # whether the last message holds results
    for message in messages:
        if message["role"] != "tool":
            found.append(dict(message))
        else:
            parts = _parts(message["content"])
            parts = [_text("<tool_response>\n"), *parts, _text("\n</tool_response>")]
            if joins:
                parts = [*_parts(found.pop()["content"]), _text("\n"), *parts]
            found.append({"role": "user", "content": _joined(parts)})
        joins = message["role"] == "tool"
    return found


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _parts(content: Any) -> list[Any]:
    return [_text(content)] if isinstance(content, str) else list(content)


def _joined(parts: Sequence[Any]) -> Any:
    """Returns plain text if all parts are text."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return list(parts)
