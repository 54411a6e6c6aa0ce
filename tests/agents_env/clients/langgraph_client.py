"""Holds conversations with an agent of `langgraph`: Chat Completions, Responses and Messages, plain and streamed."""

from __future__ import annotations

from typing import Any

from calc import SYSTEM, TASK, calc
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI


def run(model: Any, *, stream: bool) -> str:
    graph = create_agent(model, [calc], system_prompt=SYSTEM)
    given: Any = {"messages": [("user", TASK)]}
    if not stream:
        return str(graph.invoke(given)["messages"][-1].text)
    states = [value for kind, value in graph.stream(given, stream_mode=["messages", "values"]) if kind == "values"]
    return str(states[-1]["messages"][-1].text)


MODES = {
    "chat": lambda: run(ChatOpenAI(model="policy"), stream=False),
    "chat_stream": lambda: run(ChatOpenAI(model="policy"), stream=True),
    "responses": lambda: run(ChatOpenAI(model="policy", use_responses_api=True), stream=False),
    "responses_stream": lambda: run(ChatOpenAI(model="policy", use_responses_api=True), stream=True),
    "messages": lambda: run(ChatAnthropic(model_name="policy"), stream=False),  # type: ignore[call-arg]
    "messages_stream": lambda: run(ChatAnthropic(model_name="policy"), stream=True),  # type: ignore[call-arg]
}
