"""Defines a request for one turn and its answer, which all protocols are translated to and from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from relax_core.contracts.checks.foreign_values import clean_text
from relax_core.contracts.tool_use.tool_schemas import ToolSchema
from relax_core.rollout.agents.chat_messages import ChatCall, ChatMessage, Reply

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
