"""A small taskset for the package verifiers: sums of two numbers, and a harness with a calculator tool.

With a harness of the package, such as "null" or "bash", a taskset needs the program `uv` and a network, because the
package installs the harness at the start.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["CalculatorHarness", "SumTaskset"]
CALC: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Returns the sum of numbers.",
        "parameters": {
            "type": "object",
            "properties": {"numbers": {"type": "array", "items": {"type": "integer"}}},
            "required": ["numbers"],
        },
    },
}


class SumData(vf.TaskData):
    """Holds a question with its answer."""

    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Returns 1 if the last message contains the answer."""
        return float(self.data.answer in (trace.last_reply or ""))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterable[SumTask]:
        for number in range(9):
            yield SumTask(SumData(idx=number, prompt=f"{number} + 3 ?", answer=str(number + 3)), vf.TaskConfig())


class CalculatorHarness(vf.Harness[vf.HarnessConfig]):
    """Runs the conversation in this process, without a separate program."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: vf.Trace,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(4):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[CALC])
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                calls: list[Any] = message.tool_calls
                for call in calls:
                    numbers = json.loads(call.function.arguments)["numbers"]
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(sum(numbers))})
        return ProgramResult(exit_code=0, stdout="", stderr="")
