"""Translates OpenAI's Responses protocol: request bodies to requests, answers to replies or server-sent events.

``previous_response_id`` names an answer of the same session; the new input continues the conversation of this answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from relax_core.rollout.agents.answer_reading import Piece
from relax_core.rollout.agents.chat_completions import (
    chat_error,
    decoded,
    event,
    refuse_format,
    refuse_named,
    shown_tool,
)
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

_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | list[_Part] | None = None


class _Tool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Text(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: Any = None


class _ResponsesBody(msgspec.Struct):
    input: str | list[_Item]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    text: _Text | None = None
    return_token_ids: bool | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: dict[str, Any] | None = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: Any = None


_REFUSED = {
    "background": "an answer is given to the request that asks for it",
    "conversation": "conversations are not stored; send previous_response_id or the complete input",
    "prompt": "stored prompts are not supported; send the text",
    "top_logprobs": "they are not returned here; return_token_ids=true returns the tokens",
}
_decoder = msgspec.json.Decoder(_ResponsesBody)


def read_responses(body: bytes) -> TurnRequest:
    """Parses a request body. Raises `RequestRefused` for content that cannot be read, served or trained."""
    raw = decoded(body, _decoder)
    refuse_named(raw, _REFUSED)
    refuse_format(raw.text.format if raw.text is not None else None, "text.format")
    given = [ChatMessage(role="user", content=raw.input)] if isinstance(raw.input, str) else _messages(raw.input)
    wishes: dict[str, Any] = {
        name: value for name in ("temperature", "top_p", "reasoning") if (value := getattr(raw, name)) is not None
    }
    if raw.tool_choice not in (None, "auto", "none"):
        wishes["tool_choice"] = "required" if raw.tool_choice == "required" else "a named tool"
    if raw.parallel_tool_calls is False:
        wishes["parallel_tool_calls"] = False
    request = TurnRequest(
        messages=given,
        instructions=raw.instructions or "",
        previous=raw.previous_response_id or "",
        tools=() if raw.tool_choice == "none" else [_tool(tool) for tool in raw.tools or ()],
        max_tokens=raw.max_output_tokens,
        model=raw.model or "",
        stream=bool(raw.stream),
        usage=True,
        token_ids=bool(raw.return_token_ids),
        wishes=wishes,
    )
    if not request.previous:  # otherwise the session adds the earlier messages and checks all messages
        check_request(request.with_instructions())
    return request


def _tool(tool: _Tool) -> dict[str, Any]:
    if tool.type != "function" or not tool.name:
        raise refused(f"tools: one of type {tool.type[:80]!r}; only functions of the agent, with a name, are served")
    return shown_tool(tool.name, tool.description, tool.parameters)


def _messages(items: Sequence[_Item]) -> list[ChatMessage]:
    """Converts items to messages; adjacent items of one assistant's answer become one message."""
    found: list[ChatMessage] = []
    joins = False  # whether the next item may belong to the answer of the last message
    for number, item in enumerate(items):
        where = f"input[{number}]"
        part = _message(item, where)
        if part.role != "assistant":
            found.append(part)
            joins = False
            continue
        before = found[-1] if joins else ChatMessage(role="assistant", content="")
        if joins and (part.content or part.reasoning) and (before.calls or (part.reasoning and before.content)):
            joins, before = False, ChatMessage(role="assistant", content="")
        whole = ChatMessage(
            role="assistant",
            content=before.content + part.content,
            reasoning=before.reasoning + part.reasoning,
            calls=before.calls + part.calls,
        )
        found[-1:] = [whole] if joins else [*found[-1:], whole]
        joins = True
    return found


def _message(item: _Item, where: str) -> ChatMessage:
    match item.type:
        case "message":
            role = _ROLES.get(item.role or "")
            if role is None:
                raise refused(f"{where}.role={str(item.role)[:80]!r}: send one of {', '.join(_ROLES)}")
            return ChatMessage(role=role, content=_text(item.content, where))
        case "function_call":
            call = ChatCall(name=item.name or "", arguments=item.arguments or "{}", id=item.call_id or "")
            return ChatMessage(role="assistant", content="", calls=(call,))
        case "function_call_output":
            return ChatMessage(role="tool", content=_text(item.output, where), call_id=item.call_id or "")
        case "reasoning":
            return ChatMessage(role="assistant", content="", reasoning=_text(item.summary or item.content, where))
    raise refused(f"{where}: an item of type {item.type[:80]!r}, which is not read here; leave it out")


def _text(content: str | Sequence[_Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in _TEXTS:
            raise refused(f"{where}: a part of type {part.type[:80]!r}; only text is read here, so send text alone")
    return "".join(part.text or part.refusal or "" for part in content)


# -- replies ----------------------------------------------------------------------------------------------------------
def response_name(session: str, number: int) -> str:
    """Returns the id of an answer; a later request may use this id as ``previous_response_id``."""
    return f"resp_{session}_{number}"


def responses_reply(request: TurnRequest, answer: TurnAnswer, *, session: str) -> dict[str, Any]:
    """Returns the reply to a request that does not stream."""
    head = _head(request, number=answer.number, created_s=answer.created_s, session=session)
    told: dict[str, Any] = {}
    if request.token_ids:
        told = {"token_ids": list(answer.token_ids), "prompt_token_ids": list(answer.prompt_ids)}
    cut = answer.finish == "length"
    return {
        **head,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answer, session),
        "usage": {
            "input_tokens": len(answer.prompt_ids),
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": len(answer.token_ids),
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": len(answer.prompt_ids) + len(answer.token_ids),
        },
        **told,
    }


def _output(answer: TurnAnswer, session: str) -> list[dict[str, Any]]:
    reply, name = answer.reply, f"{session}_{answer.number}"
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        items.append(_reasoning(name, reply.reasoning))
    if reply.content or not reply.calls:
        items.append(_said(name, reply.content, status="completed"))
    return [*items, *(_called(call, call.arguments, status="completed") for call in reply.calls)]


def _reasoning(name: str, text: str | None) -> dict[str, Any]:
    summary = [] if text is None else [{"type": "summary_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{name}", "summary": summary}


def _said(name: str, text: str | None, *, status: str) -> dict[str, Any]:
    content = [] if text is None else [_output_text(text)]
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": content}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _called(call: ChatCall, arguments: str, *, status: str) -> dict[str, Any]:
    own = {"id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
    return {"type": "function_call", **own, "arguments": arguments, "status": status}


def _head(request: TurnRequest, *, number: int, created_s: int, session: str) -> dict[str, Any]:
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools]
    return {
        "id": response_name(session, number),
        "object": "response",
        "created_at": created_s,
        "status": "in_progress",
        "model": request.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions or None,
        "previous_response_id": request.previous or None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": tools,
        "usage": None,
    }


class ResponsesEvents:
    """Makes the server-sent events of a streamed answer: an item is added, filled, and done."""

    def __init__(self, request: TurnRequest, *, number: int, created_s: int, session: str) -> None:
        self._request, self._session = request, session
        self._name = f"{session}_{number}"
        self._head = _head(request, number=number, created_s=created_s, session=session)
        self._sent = 0
        self._index = -1
        self._open = ""  # the kind of the open item
        self._text = ""  # the text of the open item so far

    def begin(self) -> bytes:
        """Returns the first events."""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._head) for kind in kinds)

    def piece(self, piece: Piece) -> bytes:
        """Returns the events of new text."""
        kind, text = piece
        begun = self._begun(kind)
        self._text += text
        return begun + self._of_item(_DELTAS[kind], delta=text)

    def end(self, answer: TurnAnswer) -> bytes:
        """Returns the events after the text: tool calls, then the complete response."""
        events = []
        if self._index < 0 and not answer.reply.calls:
            events.append(self._begun("content"))
        events.append(self._ended())
        events += [self._call(call) for call in answer.reply.calls]
        whole = responses_reply(self._request, answer, session=self._session)
        events.append(self._event(f"response.{whole['status']}", response=whole))
        return b"".join(events)

    def failure(self, error: RequestRefused) -> bytes:
        """Returns the event that ends a stream with an error."""
        told = chat_error(error)["error"]
        return self._event("error", code=told["code"] or told["type"], message=told["message"], param=None)

    def _begun(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        ended = self._ended()
        self._open, self._text = kind, ""
        self._index += 1
        if kind == "reasoning":
            added = self._event("response.output_item.added", output_index=self._index, item=self._item(None))
            return ended + added + self._of_item("response.reasoning_summary_part.added", part=_summary(""))
        added = self._event("response.output_item.added", output_index=self._index, item=self._item(None))
        return ended + added + self._of_item("response.content_part.added", part=_output_text(""))

    def _ended(self) -> bytes:
        if not self._open:
            return b""
        if self._open == "reasoning":
            done = self._of_item("response.reasoning_summary_text.done", text=self._text)
            done += self._of_item("response.reasoning_summary_part.done", part=_summary(self._text))
        else:
            done = self._of_item("response.output_text.done", text=self._text, logprobs=[])
            done += self._of_item("response.content_part.done", part=_output_text(self._text))
        item = self._item(self._text)
        self._open = ""
        return done + self._event("response.output_item.done", output_index=self._index, item=item)

    def _item(self, text: str | None) -> dict[str, Any]:
        if self._open == "reasoning":
            return _reasoning(self._name, text)
        return _said(self._name, text, status="in_progress" if text is None else "completed")

    def _of_item(self, kind: str, **payload: Any) -> bytes:
        place = "summary_index" if self._open == "reasoning" else "content_index"
        name = f"{'rs' if self._open == 'reasoning' else 'msg'}_{self._name}"
        more: dict[str, Any] = {"logprobs": []} if kind == "response.output_text.delta" else {}
        return self._event(kind, item_id=name, output_index=self._index, **{place: 0}, **payload, **more)

    def _call(self, call: ChatCall) -> bytes:
        self._index += 1
        whole = _called(call, call.arguments, status="completed")
        of = {"item_id": whole["id"], "output_index": self._index}
        begun = _called(call, "", status="in_progress")
        return b"".join(
            [
                self._event("response.output_item.added", output_index=self._index, item=begun),
                self._event("response.function_call_arguments.delta", **of, delta=call.arguments),
                self._event("response.function_call_arguments.done", **of, name=call.name, arguments=call.arguments),
                self._event("response.output_item.done", output_index=self._index, item=whole),
            ]
        )

    def _event(self, kind: str, **payload: Any) -> bytes:
        number, self._sent = self._sent, self._sent + 1
        return event({"type": kind, "sequence_number": number, **payload}, name=kind)


_DELTAS = {"reasoning": "response.reasoning_summary_text.delta", "content": "response.output_text.delta"}


def _summary(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}
