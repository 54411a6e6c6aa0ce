"""Holds conversations with the client `openai` like its readme: Chat Completions and Responses, plain and streamed."""

from __future__ import annotations

import json
from typing import Any

from calc import PARAMETERS, PRODUCT, PRODUCT_PARAMETERS, SYSTEM, TASK, calc, multiply, question
from openai import OpenAI

CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": "calc", "description": "Computes.", "parameters": PARAMETERS}}
]
RESPONSES_TOOLS: Any = [{"type": "function", "name": "calc", "description": "Computes.", "parameters": PARAMETERS}]


def chat(stream: bool) -> str:
    client = OpenAI()
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    for _ in range(3):
        if stream:
            with client.chat.completions.stream(model="policy", messages=messages, tools=CHAT_TOOLS) as events:
                message = events.get_final_completion().choices[0].message
        else:
            reply = client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS)
            message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            result = calc(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return message.content or ""


def responses(stream: bool, *, by_id: bool = False) -> str:
    """Holds the conversation. With ``by_id``, a request names the previous answer and sends only new items."""
    client = OpenAI()
    items: list[Any] = [{"role": "user", "content": TASK}]
    more: dict[str, Any] = {}
    for _ in range(3):
        given: Any = {"model": "policy", "instructions": SYSTEM, "input": items, "tools": RESPONSES_TOOLS, **more}
        if stream:
            with client.responses.stream(**given) as events:
                reply = events.get_final_response()
        else:
            reply = client.responses.create(**given)
        if by_id:
            items, more = [], {"previous_response_id": reply.id}
        else:
            items += [item.model_dump(exclude_none=True) for item in reply.output]
        for item in reply.output:
            if item.type == "function_call":
                result = calc(**json.loads(item.arguments))
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    text: str = reply.output_text
    return text


def engine() -> str:
    """Asks the builtin model new questions until it calls the tool. Then continues this conversation to four turns."""
    client = OpenAI()
    tools: Any = [
        {"type": "function", "function": {"name": "multiply", "description": PRODUCT, "parameters": PRODUCT_PARAMETERS}}
    ]
    messages: list[Any] = [{"role": "user", "content": question(0)}]
    begun = None
    for turn in range(1, 41):
        with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as events:
            message = events.get_final_completion().choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        calls = message.tool_calls or []
        if begun is not None and turn == begun + 3:
            break
        if begun is None and calls:
            begun = turn
        for call in calls:
            result = multiply(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not calls:
            messages = [*(messages if begun else []), {"role": "user", "content": question(turn)}]
    return str(begun)


ENGINE_MODE = engine
MODES = {
    "chat": lambda: chat(False),
    "chat_stream": lambda: chat(True),
    "responses": lambda: responses(False),
    "responses_stream": lambda: responses(True),
    "responses_by_id": lambda: responses(False, by_id=True),
}
