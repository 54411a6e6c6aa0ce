"""Holds conversations with the client `anthropic` over the Messages API, with and without streaming."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from calc import PARAMETERS, PRODUCT, PRODUCT_PARAMETERS, SYSTEM, TASK, calc, multiply, question


def messages(stream: bool) -> str:
    client = Anthropic()
    history: list[Any] = [{"role": "user", "content": TASK}]
    tools: Any = [{"name": "calc", "description": "Computes.", "input_schema": PARAMETERS}]
    for _ in range(3):
        given: Any = {"model": "policy", "max_tokens": 256, "system": SYSTEM, "messages": history, "tools": tools}
        if stream:
            with client.messages.stream(**given) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**given)
        history.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": calc(**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        if results:
            history.append({"role": "user", "content": results})
    return "".join(block.text for block in message.content if block.type == "text")


def engine() -> str:
    """Asks the builtin model new questions until it calls the tool. Then continues this conversation to four turns."""
    client = Anthropic()
    tools: Any = [{"name": "multiply", "description": PRODUCT, "input_schema": PRODUCT_PARAMETERS}]
    history: list[Any] = [{"role": "user", "content": question(0)}]
    begun = None
    for turn in range(1, 41):
        with client.messages.stream(model="policy", max_tokens=32, messages=history, tools=tools) as events:
            message = events.get_final_message()
        history.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if begun is not None and turn == begun + 3:
            break
        if begun is None and calls:
            begun = turn
        results: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": multiply(**block.input)} for block in calls
        ]
        history = [*(history if begun else []), {"role": "user", "content": results or question(turn)}]
    return str(begun)


ENGINE_MODE = engine
MODES = {"messages": lambda: messages(False), "messages_stream": lambda: messages(True)}
