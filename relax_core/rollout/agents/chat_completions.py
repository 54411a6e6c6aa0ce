"""Translates OpenAI's Chat Completions protocol: bodies to requests, and answers to replies or server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from relax_core.contracts.untrusted_values import MAX_DEPTH, check_depth
from relax_core.rollout.agents.answer_reading import Piece
from relax_core.rollout.agents.chat_messages import (
    ChatCall,
    ChatMessage,
    RequestRefused,
    Role,
    TurnAnswer,
    TurnRequest,
    check_request,
    refused,
)

Body = TypeVar("Body")


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None
    type: str | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _FunctionTool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _FunctionTool


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _ChatBody(msgspec.Struct):
    messages: list[_Message]
    model: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    response_format: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    logit_bias: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    functions: Any = None
    function_call: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    ebnf: Any = None
    regex: Any = None
    json_schema: Any = None
    modalities: Any = None
    audio: Any = None
    top_k: Any = None
    min_p: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: Any = None


# Refused fields: they would change the sampled distribution, or they are not supported.
_REFUSED = {
    "logit_bias": "it changes the distribution that is trained",
    "functions": "it is the old form of tools; send tools",
    "function_call": "it is the old form of tool_choice; send tool_choice",
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "ebnf", "regex"),
        "a grammar changes the distribution that is trained",
    ),
    "json_schema": "a schema changes the distribution that is trained",
    "audio": "answers are text",
    "logprobs": "they are not returned here; return_token_ids=true returns the tokens",
    "top_logprobs": "they are not returned here; return_token_ids=true returns the tokens",
}
# Fields with a value that the run decides. A request with another value is served, and the difference is logged once.
_WISHES = ("temperature", "top_p", "seed", "top_k", "min_p", "frequency_penalty", "presence_penalty",
           "repetition_penalty", "reasoning_effort", "chat_template_kwargs")  # fmt: skip
_NEUTRAL: dict[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
_decoder = msgspec.json.Decoder(_ChatBody)


def decoded(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Decodes a JSON body and checks its types. Raises `RequestRefused` for an invalid body."""
    try:
        raw = decoder.decode(body)
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH:  # a shorter body cannot be nested too deeply
            check_depth(msgspec.to_builtins(raw))
    except ValueError as error:
        raise refused(f"the body: {error}") from error
    except RecursionError as error:
        raise refused("the body is nested too deep") from error
    return raw


def read_chat(body: bytes) -> TurnRequest:
    """Parses a request body. Raises `RequestRefused` for content that cannot be read, served or trained."""
    raw = decoded(body, _decoder)
    refuse_named(raw, _REFUSED)
    if raw.n not in (None, 1):
        raise refused(f"n={raw.n}: one answer is sampled for a request; ask {raw.n} times, or leave it out")
    refuse_format(raw.response_format, "response_format")
    if raw.modalities not in (None, ["text"]):
        raise refused(f"modalities={str(raw.modalities)[:80]}: answers are text; leave it out")
    limits = [limit for limit in (raw.max_tokens, raw.max_completion_tokens) if limit is not None]
    request = TurnRequest(
        messages=[_message(message, number) for number, message in enumerate(raw.messages)],
        tools=() if raw.tool_choice == "none" else [_tool(tool) for tool in raw.tools or ()],
        stop=stop_strings(raw.stop),
        max_tokens=min(limits, default=None),
        model=raw.model or "",
        stream=bool(raw.stream),
        usage=bool(raw.stream_options and raw.stream_options.include_usage),
        token_ids=bool(raw.return_token_ids),
        wishes=_wishes(raw),
    )
    check_request(request)
    return request


def refuse_named(raw: Any, reasons: Mapping[str, str]) -> None:
    """Raises `RequestRefused` if a refused field has a value."""
    for name, why in reasons.items():
        if getattr(raw, name) not in (None, False, 0, {}, []):
            raise refused(f"{name}: {why}; leave it out", code="unsupported_parameter")


def refuse_format(wanted: Mapping[str, Any] | None, key: str) -> None:
    """Raises `RequestRefused` for a response format other than text."""
    if wanted is not None and wanted.get("type", "text") != "text":
        raise refused(
            f"{key}.type={str(wanted.get('type'))[:80]!r}: a forced form changes the trained distribution; "
            "describe the form of the answer in the prompt",
            code="unsupported_parameter",
        )


def stop_strings(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the stop strings of a request in order, without duplicates."""
    return tuple(dict.fromkeys([given] if isinstance(given, str) else given or ()))


def shown_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a tool in the format that chat templates expect."""
    function = {
        "name": name,
        "description": description or "",
        "parameters": dict(parameters or {"type": "object", "properties": {}}),
    }
    return {"type": "function", "function": function}


def _tool(tool: _Tool) -> dict[str, Any]:
    return shown_tool(tool.function.name, tool.function.description, tool.function.parameters)


def _wishes(raw: _ChatBody) -> dict[str, Any]:
    given = {name: getattr(raw, name) for name in _WISHES}
    wishes = {name: value for name, value in given.items() if value is not None and value != _NEUTRAL.get(name)}
    if raw.tool_choice not in (None, "auto", "none"):
        wishes["tool_choice"] = "required" if raw.tool_choice == "required" else "a named tool"
    if raw.parallel_tool_calls is False:
        wishes["parallel_tool_calls"] = False
    if any(tool.function.strict for tool in raw.tools or ()):
        wishes["tools.function.strict"] = True
    return wishes


def _message(message: _Message, number: int) -> ChatMessage:
    role: Role = "system" if message.role == "developer" else message.role
    where = f"messages[{number}]"
    if role != "assistant" and message.tool_calls:
        raise refused(f"{where}: only the assistant calls tools; leave tool_calls out")
    if role != "assistant" and message.content is None:
        raise refused(f"{where}.content: it is missing; send text")
    return ChatMessage(
        role=role,
        content=_text(message.content, where),
        reasoning=(message.reasoning_content or message.reasoning or "") if role == "assistant" else "",
        calls=tuple(_call(call) for call in message.tool_calls or ()),
        call_id=(message.tool_call_id or "") if role == "tool" else "",
    )


def _text(content: str | Sequence[_Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.type not in ("text", "refusal"):
            raise refused(
                f"{where}.content: a part of type {part.type[:80]!r}; only text is read here, so send parts of type "
                "text alone"
            )
        texts.append(part.text or part.refusal or "")
    return "".join(texts)


def _call(call: _ToolCall) -> ChatCall:
    given = call.function.arguments
    text = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    return ChatCall(name=call.function.name, arguments=text or "{}", id=call.id or "")


# -- replies ----------------------------------------------------------------------------------------------------------
def chat_reply(request: TurnRequest, answer: TurnAnswer, *, session: str) -> dict[str, Any]:
    """Returns the reply to a request that does not stream."""
    reply = answer.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_shown_call(call) for call in reply.calls]
    choice = {"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None}
    told: dict[str, Any] = {}
    if request.token_ids:
        choice["token_ids"] = list(answer.token_ids)
        told["prompt_token_ids"] = list(answer.prompt_ids)
    return {**_head(request, answer, "chat.completion", session), "choices": [choice], "usage": _usage(answer), **told}


class ChatEvents:
    """Makes the server-sent events of a streamed answer."""

    def __init__(self, request: TurnRequest, *, number: int, created_s: int, session: str) -> None:
        self._request = request
        self._base = {
            "id": _name(session, number),
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": request.model,
        }

    def begin(self) -> bytes:
        """Returns the first event."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> bytes:
        """Returns the event of new text."""
        kind, text = piece
        return self._chunk({"reasoning_content" if kind == "reasoning" else "content": text})

    def end(self, answer: TurnAnswer) -> bytes:
        """Returns the events after the text: tool calls, finish reason, token counts."""
        events = [
            self._chunk({"tool_calls": [{"index": index, **_shown_call(call)}]})
            for index, call in enumerate(answer.reply.calls)
        ]
        told: dict[str, Any] = {}
        if self._request.token_ids:
            told = {"token_ids": list(answer.token_ids)}
            self._base["prompt_token_ids"] = list(answer.prompt_ids)
        events.append(self._chunk({}, finish_reason=answer.finish, **told))
        self._base.pop("prompt_token_ids", None)
        if self._request.usage:
            events.append(event({**self._base, "choices": [], "usage": _usage(answer)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def failure(self, error: RequestRefused) -> bytes:
        """Returns the event that ends a stream with an error."""
        return event(chat_error(error))

    def _chunk(self, delta: Mapping[str, Any], *, finish_reason: str | None = None, **told: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **told}
        return event({**self._base, "choices": [choice]})


def event(payload: Mapping[str, Any], *, name: str = "") -> bytes:
    """Returns one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(payload) + b"\n\n"


_KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def chat_error(error: RequestRefused) -> dict[str, Any]:
    """Returns the body of a refusal in OpenAI's format."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code or None}}


def _head(request: TurnRequest, answer: TurnAnswer, kind: str, session: str) -> dict[str, Any]:
    return {
        "id": _name(session, answer.number),
        "object": kind,
        "created": answer.created_s,
        "model": request.model,
    }


def _name(session: str, number: int) -> str:
    return f"chatcmpl-{session}-{number}"


def _shown_call(call: ChatCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(answer: TurnAnswer) -> dict[str, Any]:
    prompt, completion = len(answer.prompt_ids), len(answer.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }
