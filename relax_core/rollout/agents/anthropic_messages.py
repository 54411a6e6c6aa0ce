"""Translates Anthropic's Messages protocol: request bodies to requests, answers to replies or server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from relax_core.rollout.agents.answer_reading import Piece
from relax_core.rollout.agents.chat_completions import decoded, event, refuse_named, shown_tool, stop_strings
from relax_core.rollout.agents.chat_messages import (
    ChatCall,
    ChatMessage,
    RequestRefused,
    TurnAnswer,
    TurnRequest,
    check_request,
    refused,
)

SIGNATURE = "relax"  # of thinking blocks; clients send the signature back, and Relax does not check it


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class _MessagesBody(msgspec.Struct):
    messages: list[_Message]
    max_tokens: int
    model: str | None = None
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: dict[str, Any] | None = None
    output_format: Any = None
    output_config: Any = None
    mcp_servers: Any = None
    container: Any = None


_REFUSED = {
    "output_format": "a forced format changes the trained distribution",
    "output_config": "a forced format changes the trained distribution",
    "mcp_servers": "tools run in the agent",
    "container": "tools run in the agent",
}
_decoder = msgspec.json.Decoder(_MessagesBody)


def read_messages(body: bytes) -> TurnRequest:
    """Parses a request body. Raises `RequestRefused` for content that cannot be read, served or trained."""
    raw = decoded(body, _decoder)
    refuse_named(raw, _REFUSED)
    messages = []
    if raw.system:
        messages.append(ChatMessage(role="system", content=_text(raw.system, "system")))
    for number, message in enumerate(raw.messages):
        messages += _messages(message, f"messages[{number}]")
    choice = (raw.tool_choice or {}).get("type", "auto")
    wishes = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(raw, name)) is not None}
    if raw.thinking is not None:
        wishes["thinking"] = raw.thinking.get("type")
    if choice not in ("auto", "none"):
        wishes["tool_choice"] = "required" if choice == "any" else "a named tool"
    request = TurnRequest(
        messages=messages,
        tools=() if choice == "none" else [_tool(tool) for tool in raw.tools or ()],
        stop=stop_strings(raw.stop_sequences),
        max_tokens=raw.max_tokens,
        model=raw.model or "",
        stream=bool(raw.stream),
        usage=True,
        token_ids=bool(raw.return_token_ids),
        wishes=wishes,
    )
    check_request(request)
    return request


def _tool(tool: _Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise refused(
            f"tools: {tool.name[:80]!r} has the type {tool.type[:80]!r}; only the agent's own tools are supported"
        )
    return shown_tool(tool.name, tool.description, tool.input_schema)


def _messages(message: _Message, where: str) -> list[ChatMessage]:
    """Returns a message; tool results inside a user message become separate messages."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    if message.role != "assistant":
        return _of_user(message, message.content, where)
    content, reasoning, calls = "", "", []
    for block in message.content:
        if block.type == "text":
            content += block.text or ""
        elif block.type == "thinking":
            reasoning += block.thinking or ""
        elif block.type == "tool_use":
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            calls.append(ChatCall(name=block.name or "", arguments=arguments, id=block.id or ""))
        elif block.type != "redacted_thinking":
            raise _unread(block, where)
    return [ChatMessage(role="assistant", content=content, reasoning=reasoning, calls=tuple(calls))]


def _of_user(message: _Message, blocks: Sequence[_Block], where: str) -> list[ChatMessage]:
    found: list[ChatMessage] = []
    texts: list[str] = []
    for block in blocks:
        if block.type == "tool_result":
            content = block.content if isinstance(block.content, str) else _result(block.content, where)
            found.append(ChatMessage(role="tool", content=content, call_id=block.tool_use_id or ""))
        elif block.type == "text":
            texts.append(block.text or "")
        else:
            raise _unread(block, where)
    if texts or not found:
        found.append(ChatMessage(role=message.role, content="".join(texts)))
    return found


def _result(content: Any, where: str) -> str:
    if content is None:
        return ""
    try:
        return _text(msgspec.convert(content, list[_Block]), where)
    except msgspec.ValidationError as error:
        raise refused(f"{where}.content: the result of a tool: {error}") from error


def _text(content: str | Sequence[_Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            raise _unread(block, where)
    return "".join(block.text or "" for block in content)


def _unread(block: _Block, where: str) -> RequestRefused:
    return refused(f"{where}.content: a block of type {block.type[:80]!r}; only text is supported here")


# -- replies ----------------------------------------------------------------------------------------------------------
def messages_reply(request: TurnRequest, answer: TurnAnswer, *, session: str) -> dict[str, Any]:
    """Returns the reply to a request that does not stream."""
    reply, blocks = answer.reply, list[dict[str, Any]]()
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": SIGNATURE})
    if reply.content or not reply.calls:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    told: dict[str, Any] = {}
    if request.token_ids:
        told = {"token_ids": list(answer.token_ids), "prompt_token_ids": list(answer.prompt_ids)}
    return {
        "id": f"msg_{session}_{answer.number}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": blocks,
        **_stop(answer),
        "usage": _usage(answer),
        **told,
    }


class MessagesEvents:
    """Makes the server-sent events of a streamed answer; a content block has a start event and a stop event."""

    def __init__(self, request: TurnRequest, *, number: int, prompt_tokens: int, session: str) -> None:
        self._request = request
        self._name = f"msg_{session}_{number}"
        self._prompt_tokens = prompt_tokens
        self._index = -1
        self._open = ""  # the kind of the open block

    def begin(self) -> bytes:
        """Returns the first event."""
        message: dict[str, Any] = {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._prompt_tokens, "output_tokens": 0},
        }
        return _event("message_start", message=message)

    def piece(self, piece: Piece) -> bytes:
        """Returns the events of new text."""
        kind, text = piece
        if kind == "reasoning":
            begun = self._begun("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return begun + self._delta({"type": "thinking_delta", "thinking": text})
        begun = self._begun("text", {"type": "text", "text": ""})
        return begun + self._delta({"type": "text_delta", "text": text})

    def end(self, answer: TurnAnswer) -> bytes:
        """Returns the events after the text: tool calls, stop reason, token counts."""
        events = []
        if self._index < 0 and not answer.reply.calls:
            events.append(self._begun("text", {"type": "text", "text": ""}))
        for call in answer.reply.calls:
            events.append(self._ended())
            begun = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            events.append(self._begun("tool_use", begun))
            events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        events.append(self._ended())
        events.append(_event("message_delta", delta=_stop(answer), usage=_usage(answer)))
        events.append(_event("message_stop"))
        return b"".join(events)

    def failure(self, error: RequestRefused) -> bytes:
        """Returns the event that ends a stream with an error."""
        return event(messages_error(error), name="error")

    def _begun(self, kind: str, block: Mapping[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        ended = self._ended()
        self._open = kind
        self._index += 1
        return ended + _event("content_block_start", index=self._index, content_block=block)

    def _ended(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._open = ""
        return signed + _event("content_block_stop", index=self._index)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(name: str, **payload: Any) -> bytes:
    return event({"type": name, **payload}, name=name)


_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def messages_error(error: RequestRefused) -> dict[str, Any]:
    """Returns the body of a refusal in Anthropic's format."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _stop(answer: TurnAnswer) -> dict[str, Any]:
    if answer.finish == "length":
        reason = "max_tokens"
    elif answer.finish == "tool_calls":
        reason = "tool_use"
    else:
        reason = "stop_sequence" if answer.stopped_by is not None else "end_turn"
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by if reason == "stop_sequence" else None}


def _usage(answer: TurnAnswer) -> dict[str, Any]:
    """Returns the token counts; Anthropic counts cached tokens of the prompt separately."""
    return {
        "input_tokens": len(answer.prompt_ids) - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(answer.token_ids),
    }
