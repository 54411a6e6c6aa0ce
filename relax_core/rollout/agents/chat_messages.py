"""Defines a message of a conversation in one form for all protocols, and when two messages are the same.

A client sends a conversation back in its own words: it leaves out thinking, writes the arguments of a call with other
white space, or changes ids. What was sampled is found again by what the message says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from relax_core.contracts.checks.foreign_values import clean_value

Role = Literal["system", "user", "assistant", "tool"]
Grade = Literal["same", "begins", "foreign"]
Identity = tuple[Any, ...]
_THINKING = re.compile(r"\s*<think>(.*?)</think>\s*(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """Is one call of a tool; ``arguments`` is the text of a JSON object, as the client or the model wrote it."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """Is one message. ``reasoning`` is the thinking of an assistant, and ``calls`` are its calls of tools.

    ``call_id`` is the id of the call whose result a message of a tool is.
    """

    role: Role
    content: str
    reasoning: str = ""
    calls: tuple[ChatCall, ...] = ()
    call_id: str = ""

    @property
    def identity(self) -> Identity:
        """Returns what the message says, without ids and thinking; equal identities are one message."""
        if self.role == "assistant":
            return (self.role, self.content.strip(), called(self.calls))
        return (self.role, self.content)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Is a sampled response as a client sees it.

    ``content`` is the text without thinking, calls and the string that stopped it, and ``full`` the text with that
    string, which a client may put back.
    """

    content: str
    full: str
    reasoning: str = ""
    calls: tuple[ChatCall, ...] = ()

    def message(self) -> ChatMessage:
        """Returns the reply as the message of an assistant."""
        return ChatMessage(role="assistant", content=self.content, reasoning=self.reasoning, calls=self.calls)


def compared(message: ChatMessage, reply: Reply) -> tuple[Grade, str]:
    """Returns whether an assistant's message is this reply, begins with it, or is foreign, and the text behind it.

    Thinking counts only if the client sends it. Some clients write it in front of the text, between its tags.
    """
    grade, rest = _compared(message, reply)
    if grade == "foreign" and not message.reasoning and (apart := _THINKING.match(message.content)):
        return _compared(replace(message, reasoning=apart[1], content=apart[2]), reply)
    return grade, rest


def _compared(message: ChatMessage, reply: Reply) -> tuple[Grade, str]:
    if called(message.calls) != called(reply.calls):
        return "foreign", ""
    if message.reasoning.strip() and message.reasoning.strip() != reply.reasoning.strip():
        return "foreign", ""
    text = message.content
    if text.strip() in (reply.content.strip(), reply.full.strip()):
        return "same", ""
    for whole in (reply.full, reply.full.strip()):
        if whole.strip() and text.startswith(whole):
            return "begins", text[len(whole) :]
    return "foreign", ""


def called(calls: Sequence[ChatCall]) -> tuple[tuple[str, str], ...]:
    """Returns names and arguments of calls in the one form that equal ones share."""
    return tuple((call.name, same_json(call.arguments)) for call in calls)


def same_json(text: str) -> str:
    """Returns a JSON text in the one form that texts of equal values share; other text stays as it is.

    The order of keys and white space do not count, and numbers count by their value.
    """
    try:
        value = json.loads(text) if text.strip() else {}
        return json.dumps(_by_value(value), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text


def _by_value(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _by_value(one) for key, one in value.items()}
    return [_by_value(one) for one in value] if isinstance(value, list) else value


def template_messages(messages: Sequence[ChatMessage], *, arguments_as_text: bool = False) -> list[dict[str, Any]]:
    """Returns messages as a chat template takes them; the results of tools name the tool that was called.

    Most templates take the arguments of a call as an object, some as JSON text.
    """
    names: dict[str, str] = {}
    shown: list[dict[str, Any]] = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            one["reasoning_content"] = message.reasoning
        if message.calls:
            names |= {call.id: call.name for call in message.calls}
            one["tool_calls"] = [_shown_call(call, as_text=arguments_as_text) for call in message.calls]
        if message.role == "tool":
            one["tool_call_id"] = message.call_id
            if name := names.get(message.call_id):
                one["name"] = name
        shown.append(one)
    return shown


def _shown_call(call: ChatCall, *, as_text: bool) -> dict[str, Any]:
    arguments: Any = call.arguments
    if not as_text:
        try:
            arguments = clean_value(json.loads(call.arguments))
        except (ValueError, RecursionError):
            arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
