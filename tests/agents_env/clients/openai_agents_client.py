"""Holds conversations with the runner of `openai-agents`: Chat Completions and Responses, plain and streamed."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from calc import SYSTEM, TASK, calc
from openai import AsyncOpenAI

set_tracing_disabled(True)
KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


async def run(kind: str, *, stream: bool) -> str:
    async with AsyncOpenAI() as client:
        model = KINDS[kind](model="policy", openai_client=client)
        agent = Agent(name="A", instructions=SYSTEM, model=model, tools=[function_tool(calc)])
        if not stream:
            return str((await Runner.run(agent, TASK)).final_output)
        running = Runner.run_streamed(agent, TASK)
        async for _ in running.stream_events():
            pass
        return str(running.final_output)


MODES = {
    "chat": lambda: asyncio.run(run("chat", stream=False)),
    "chat_stream": lambda: asyncio.run(run("chat", stream=True)),
    "responses": lambda: asyncio.run(run("responses", stream=False)),
    "responses_stream": lambda: asyncio.run(run("responses", stream=True)),
}
