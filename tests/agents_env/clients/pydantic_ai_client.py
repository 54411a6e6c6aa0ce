"""Holds conversations with an agent of `pydantic-ai`: Chat Completions, Responses and Messages, plain and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Any

from calc import SYSTEM, TASK, calc
from pydantic_ai import Agent

KINDS = {"chat": "openai-chat:policy", "responses": "openai-responses:policy", "messages": "anthropic:policy"}


async def run(kind: str, *, stream: bool) -> str:
    agent = Agent(KINDS[kind], tools=[calc], instructions=SYSTEM)
    if not stream:
        return str((await agent.run(TASK)).output)
    return str((await agent.run(TASK, event_stream_handler=read_all)).output)


async def read_all(context: Any, events: AsyncIterable[Any]) -> None:
    """Reads all events. With an event handler, pydantic-ai streams each request of the run."""
    async for _ in events:
        pass


MODES = {
    "chat": lambda: asyncio.run(run("chat", stream=False)),
    "chat_stream": lambda: asyncio.run(run("chat", stream=True)),
    "responses": lambda: asyncio.run(run("responses", stream=False)),
    "responses_stream": lambda: asyncio.run(run("responses", stream=True)),
    "messages": lambda: asyncio.run(run("messages", stream=False)),
    "messages_stream": lambda: asyncio.run(run("messages", stream=True)),
}
