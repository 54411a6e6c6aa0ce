"""Defines messages of a conversation, and the request for one turn with its answer, in one form for all protocols.

A client sends a conversation back in its own words: it leaves out thinking, writes the arguments of a call with other
white space, or changes ids. What was sampled is found again by what the message says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from relax_core.contracts.foreign_values import clean_text, clean_value
from relax_core.contracts.tool_calls import ToolSchema

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


MOST_MESSAGES = 4096  # of a request
MOST_TOOLS = 256
MOST_STOPS, MOST_STOP_CHARACTERS = 16, 256
Finish = Literal["stop", "length", "tool_calls"]


class RequestRefused(Exception):
    """Refuses a request with an HTTP status; the text names what is wrong and the fix, ``code`` is for programs.

    With ``retry_after_s`` the client may ask again after that many seconds.
    """

    def __init__(self, status: int, message: str, *, code: str = "", retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s


def refused(message: str, *, code: str = "") -> RequestRefused:
    """Returns the refusal of a request that cannot be served or trained as it is."""
    return RequestRefused(400, message, code=code)


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """Is a request for one answer.

    ``max_tokens`` limits its sampled tokens. ``wishes`` are values that the request names and the run does not follow,
    by their keys, such as a temperature. ``token_ids``: the answer tells its tokens. ``usage``: a stream ends with the
    counts of tokens. ``previous`` names the answer of the session whose conversation goes on with ``messages``, and
    ``instructions`` are a system message in front of the whole (`whole`). ``size`` is the number of bytes of its body.
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

    def whole(self) -> TurnRequest:
        """Returns the request with its instructions as the first message."""
        if not self.instructions:
            return self
        return replace(self, messages=[ChatMessage(role="system", content=self.instructions), *self.messages])


@dataclass(frozen=True, kw_only=True)
class TurnAnswer:
    """Is the answer to a request.

    ``number`` is its number in the session. ``token_ids`` are all sampled tokens, ``reasoning_tokens`` of them are
    thinking, and ``cached_tokens`` of the prompt's tokens were kept by the engine. ``stopped_by`` is the stop string
    that ended it, if one did. ``created_s`` is the Unix time of the request.
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
    """Raises `RequestRefused` for what no protocol's types say: counts, roles in order, results without their call."""
    messages = request.messages
    if not messages:
        raise refused("messages: there is none; send at least one message of the user")
    if len(messages) > MOST_MESSAGES:
        raise refused(f"messages: there are {len(messages)}, at most {MOST_MESSAGES} are taken; shorten the history")
    if len(request.tools) > MOST_TOOLS:
        raise refused(f"tools: there are {len(request.tools)}, at most {MOST_TOOLS} are taken; send fewer")
    if len(request.stop) > MOST_STOPS or any(not 0 < len(one) <= MOST_STOP_CHARACTERS for one in request.stop):
        raise refused(
            f"stop: at most {MOST_STOPS} strings of 1 to {MOST_STOP_CHARACTERS} characters are taken; send fewer, and "
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
