"""Holds conversations with `smolagents`: its tool agent (rewrites answers) and its code agent, plain and streamed."""

from __future__ import annotations

import os

from calc import TASK
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def calc(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: such as 12*7
    """
    left, right = expression.split("*")
    return str(int(left) * int(right))


def run(kind: type, *, stream: bool) -> str:
    model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = kind(tools=[calc], model=model, max_steps=4, verbosity_level=0, stream_outputs=stream)
    return str(agent.run(TASK))


MODES = {
    "tools": lambda: run(ToolCallingAgent, stream=False),
    "tools_stream": lambda: run(ToolCallingAgent, stream=True),
    "code": lambda: run(CodeAgent, stream=False),
    "code_stream": lambda: run(CodeAgent, stream=True),
}
