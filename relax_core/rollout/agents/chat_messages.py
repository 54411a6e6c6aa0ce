"""Defines chat messages, requests and answers in a common form for all client protocols.

A client sends the conversation with every request, but it may change the conversation: it may omit thinking, reformat
the arguments of a call, or change ids. Therefore messages of the client are matched to sampled answers by their
content.
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
    """Holds one message. ``reasoning`` and ``calls`` are the thinking and the tool calls of an assistant's message.

    ``call_id`` of a tool's message is the id of the answered call.
    """

    role: Role
    content: str
    reasoning: str = ""
    calls: tuple[ChatCall, ...] = ()
    call_id: str = ""

    @property
    def identity(self) -> Identity:
        """Returns the content of the message without ids and thinking. Messages with equal identities are equal."""
        if self.role == "assistant":
            return (self.role, self.content.strip(), called(self.calls))
        return (self.role, self.content)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Holds a sampled response in the form that clients receive.

    ``content`` is the text without thinking, calls, and the stop string that ended the response. ``full`` includes the
    stop string, because a client may send the text back with this string.
    """

    content: str
    full: str
    reasoning: str = ""
    calls: tuple[ChatCall, ...] = ()

    def message(self) -> ChatMessage:
        """Returns the reply as an assistant's message."""
        return ChatMessage(role="assistant", content=self.content, reasoning=self.reasoning, calls=self.calls)


def compared(message: ChatMessage, reply: Reply) -> tuple[Grade, str]:
    """Compares an assistant's message with a reply; returns the grade, and the text after the reply.

    The grade is "same", "begins" (the message has further text after the reply) or "foreign".

    Thinking is compared only if the client sends it. Some clients write the thinking with its tags before the text.
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
    """Returns the names and arguments of calls in canonical form."""
    return tuple((call.name, same_json(call.arguments)) for call in calls)


def same_json(text: str) -> str:
    """Returns a JSON text in canonical form; other text is returned unchanged.

    Two JSON texts have the same canonical form if their values are equal: the order of keys, white space and the
    notation of numbers do not matter.
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
    """Returns messages in the format that chat templates expect; tool results name the called tool.

    Most templates expect the arguments of a call as an object; a few expect JSON text.
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
    """Refuses a request with an HTTP status. The text names the problem and the fix; ``code`` is for programs.

    ``retry_after_s``: the client may send the request again after this many seconds.
    """

    def __init__(self, status: int, message: str, *, code: str = "", retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s


def refused(message: str, *, code: str = "") -> RequestRefused:
    """Returns the refusal (HTTP 400) of a request that cannot be served or trained."""
    return RequestRefused(400, message, code=code)


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """Holds a request for one answer.

    ``max_tokens`` limits the sampled tokens. ``wishes`` has requested values that the run decides, such as a
    temperature, by key. ``token_ids``: the client receives the tokens of the answer. ``usage``: a stream ends with
    token counts. ``previous`` is the id of an earlier answer of the session; ``messages`` continue the conversation of
    this answer. ``instructions`` is a system message before all messages (`with_instructions`). ``size`` is the number
    of bytes of the body.
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
        """Returns a copy of the request with the instructions as the first message."""
        if not self.instructions:
            return self
        return replace(self, messages=[ChatMessage(role="system", content=self.instructions), *self.messages])


@dataclass(frozen=True, kw_only=True)
class TurnAnswer:
    """Holds the answer to a request.

    ``number`` is the number of the answer in the session. ``token_ids`` are all sampled tokens. ``reasoning_tokens`` is
    the number of sampled tokens that are thinking, and ``cached_tokens`` is the number of prompt tokens in the engine's
    cache. ``stopped_by`` is the stop string that ended the answer, or None. ``created_s`` is the Unix time of the
    request.
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
    """Raises `RequestRefused` for errors that types cannot exclude: counts, order of roles, results without a call."""
    messages = request.messages
    if not messages:
        raise refused("messages: there is none; send at least one message of the user")
    if len(messages) > MAX_MESSAGES:
        raise refused(f"messages: there are {len(messages)}, at most {MAX_MESSAGES} are accepted; shorten the history")
    if len(request.tools) > MAX_TOOLS:
        raise refused(f"tools: there are {len(request.tools)}, at most {MAX_TOOLS} are accepted; send fewer")
    if len(request.stop) > MAX_STOP_STRINGS or any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in request.stop):
        raise refused(
            f"stop: at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters are accepted; send "
            "fewer or shorter strings, and no empty string"
        )
    if request.max_tokens is not None and request.max_tokens < 1:
        raise refused(f"max_tokens={request.max_tokens}: give 1 or more, or leave it out")
    if messages[-1].role == "assistant":
        raise refused(
            "messages: the last message is an assistant message. An answer that the client begins is not sampled; end "
            "with a message of the user or the result of a tool"
        )
    _check_results(messages)
    names = [tool["function"]["name"] for tool in request.tools]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise refused(f"tools: two of them have the name {double[:80]!r}; a call has only the tool's name")


def _check_results(messages: Sequence[ChatMessage]) -> None:
    called: set[str] = set()
    for number, message in enumerate(messages):
        called.update(call.id for call in message.calls)
        if message.role == "tool" and message.call_id not in called:
            raise refused(
                f"messages[{number}]: the result of a tool has the id {message.call_id[:80]!r}, which no earlier "
                "call has; send the assistant's message with the call, too"
            )
        for text in (message.content, message.reasoning, *_call_texts(message.calls)):
            if clean_text(text) != text:
                raise refused(f"messages[{number}]: half of a surrogate pair is not text; send complete characters")


def _call_texts(calls: Sequence[ChatCall]) -> list[str]:
    return [text for call in calls for text in (call.name, call.arguments)]
