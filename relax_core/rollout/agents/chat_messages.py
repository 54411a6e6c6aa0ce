"""Defines chat messages, requests for an answer and their answers in one form for all client protocols.

A client does not return a conversation unchanged: it omits thinking, writes the arguments of a call with other white
space, or changes ids. Therefore sampled answers are found by the content of their messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from relax_core.contracts.tool_calls import ToolSchema
from relax_core.contracts.untrusted_values import clean_text, clean_value

Role = Literal["system", "user", "assistant", "tool"]
Grade = Literal["same", "begins", "foreign"]
Identity = tuple[Any, ...]
_THINKING = re.compile(r"\s*<think>(.*?)</think>\s*(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """Holds one tool call; ``arguments`` is the text of a JSON object, as the client or the model wrote it."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """Holds one message. ``reasoning`` is the thinking of an assistant, and ``calls`` are its tool calls.

    ``call_id`` of a tool's message is the id of the call that it answers.
    """

    role: Role
    content: str
    reasoning: str = ""
    calls: tuple[ChatCall, ...] = ()
    call_id: str = ""

    @property
    def identity(self) -> Identity:
        """Returns the content of the message without ids and thinking; messages with equal identities are the same."""
        if self.role == "assistant":
            return (self.role, self.content.strip(), called(self.calls))
        return (self.role, self.content)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Holds a sampled response in the form that a client gets.

    ``content`` is the text without thinking, calls and the stop string that ended it. ``full`` includes that string,
    because a client may send it back.
    """

    content: str
    full: str
    reasoning: str = ""
    calls: tuple[ChatCall, ...] = ()

    def message(self) -> ChatMessage:
        """Returns the reply as an assistant's message."""
        return ChatMessage(role="assistant", content=self.content, reasoning=self.reasoning, calls=self.calls)


def compared(message: ChatMessage, reply: Reply) -> tuple[Grade, str]:
    """Returns whether an assistant's message equals a reply, begins with it or is foreign, and the text after it.

    Thinking counts only if the client sends it. Some clients write it before the text, between its tags.
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
    """Returns names and arguments of calls in canonical form."""
    return tuple((call.name, same_json(call.arguments)) for call in calls)


def same_json(text: str) -> str:
    """Returns a JSON text in the canonical form of its value; other text stays as it is.

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
        return {key: _by_value(inner) for key, inner in value.items()}
    return [_by_value(element) for element in value] if isinstance(value, list) else value


def template_messages(messages: Sequence[ChatMessage], *, arguments_as_text: bool = False) -> list[dict[str, Any]]:
    """Returns messages in the format of chat templates; tool results name the called tool.

    Most templates take the arguments of a call as an object, some as JSON text.
    """
    names: dict[str, str] = {}
    shown: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if message.calls:
            names |= {call.id: call.name for call in message.calls}
            entry["tool_calls"] = [_shown_call(call, as_text=arguments_as_text) for call in message.calls]
        if message.role == "tool":
            entry["tool_call_id"] = message.call_id
            if name := names.get(message.call_id):
                entry["name"] = name
        shown.append(entry)
    return shown


def _shown_call(call: ChatCall, *, as_text: bool) -> dict[str, Any]:
    arguments: Any = call.arguments
    if not as_text:
        try:
            arguments = clean_value(json.loads(call.arguments))
        except (ValueError, RecursionError):
            arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


MAX_MESSAGES = 4096  # largest number of messages in a request
MAX_TOOLS = 256
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 256
Finish = Literal["stop", "length", "tool_calls"]


class RequestRefused(Exception):
    """Refuses a request with an HTTP status; the text names the problem and the fix, ``code`` is for programs.

    With ``retry_after_s`` the client may send it again after that many seconds.
    """

    def __init__(self, status: int, message: str, *, code: str = "", retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s


def refused(message: str, *, code: str = "") -> RequestRefused:
    """Returns the refusal of a request that cannot be served or trained as it is."""
    return RequestRefused(400, message, code=code)


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """Holds a request for one answer.

    ``max_tokens`` limits its sampled tokens. ``wishes`` are values in the request that the run does not follow, by
    their keys, such as a temperature. ``token_ids``: the answer includes its tokens. ``usage``: a stream ends with
    the counts of tokens. ``previous`` names the answer of the session whose conversation ``messages`` continue, and
    ``instructions`` are a system message before all of them (`with_instructions`). ``size`` is the number of bytes of
    its body.
    """

    messages: Sequence[ChatMessage]
    instructions: str = ""
    previous: str = ""
    tools: Sequence[ToolSchema] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    model: str = ""
    stream: bool = False
    usage: bool = False
    token_ids: bool = False
    wishes: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0

    def with_instructions(self) -> TurnRequest:
        """Returns the request with its instructions as the first message."""
        if not self.instructions:
            return self
        return replace(self, messages=[ChatMessage(role="system", content=self.instructions), *self.messages])


@dataclass(frozen=True, kw_only=True)
class TurnAnswer:
    """Holds the answer to a request.

    ``number`` is its number in the session. ``token_ids`` are all sampled tokens, ``reasoning_tokens`` of them are
    thinking, and ``cached_tokens`` of the prompt's tokens were cached by the engine. ``stopped_by`` is the stop
    string that ended it, None if none did. ``created_s`` is the Unix time of the request.
    """

    number: int
    reply: Reply
    finish: Finish
    stopped_by: str | None
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    cached_tokens: int
    reasoning_tokens: int
    created_s: int


def check_request(request: TurnRequest) -> None:
    """Raises `RequestRefused` for errors that types do not catch: counts, order of roles, results without a call."""
    messages = request.messages
    if not messages:
        raise refused("messages: there is none; send at least one message of the user")
    if len(messages) > MAX_MESSAGES:
        raise refused(f"messages: there are {len(messages)}, at most {MAX_MESSAGES} are taken; shorten the history")
    if len(request.tools) > MAX_TOOLS:
        raise refused(f"tools: there are {len(request.tools)}, at most {MAX_TOOLS} are taken; send fewer")
    if len(request.stop) > MAX_STOP_STRINGS or any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in request.stop):
        raise refused(
            f"stop: at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters are taken; send fewer, "
            "and "
            "no empty one"
        )
    if request.max_tokens is not None and request.max_tokens < 1:
        raise refused(f"max_tokens={request.max_tokens}: give 1 or more, or leave it out")
    if messages[-1].role == "assistant":
        raise refused(
            "messages: the last one is the assistant's. An answer that the client begins is not sampled; end with a "
            "message of the user or the result of a tool"
        )
    _check_results(messages)
    names = [tool["function"]["name"] for tool in request.tools]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise refused(f"tools: two of them have the name {double[:80]!r}; a call names its tool alone")


def _check_results(messages: Sequence[ChatMessage]) -> None:
    called: set[str] = set()
    for number, message in enumerate(messages):
        called.update(call.id for call in message.calls)
        if message.role == "tool" and message.call_id not in called:
            raise refused(
                f"messages[{number}]: the result of a tool with the id {message.call_id[:80]!r}, which no call before "
                "it has; send the assistant's message with the call, too"
            )
        for text in (message.content, message.reasoning, *_call_texts(message.calls)):
            if clean_text(text) != text:
                raise refused(f"messages[{number}]: half of a surrogate pair is no text; send whole characters")


def _call_texts(calls: Sequence[ChatCall]) -> list[str]:
    return [text for call in calls for text in (call.name, call.arguments)]
