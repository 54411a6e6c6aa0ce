"""An env with a tool: the policy answers with a product of two numbers, and can call a calculator."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, InteractionConfig, StepResult
from relax_core.contracts.tool_calls import ToolCall, ToolMistake, call_tool

_DIGITS = re.compile(r"-?\d[\d,]*")


@dataclass(frozen=True)
class CalculatorConfig(InteractionConfig):
    """Holds the settings of the task; each factor has ``digits`` digits. With ``tool`` False there is no calculator."""

    name: str = "calculator"
    max_turns: int = 3
    digits: int = 3
    tool: bool = True


def multiply(a: Annotated[int, "the first factor"], b: Annotated[int, "the second factor"]) -> int:
    """Returns the product of two whole numbers."""
    return a * b


class Calculator(BaseInteractionEnv):
    """Asks for one product. The seed of the factors is from the row of data=seeds, or else the group's seed.

    The last number in a response without a call is the answer.
    """

    def __init__(self, start: EpisodeStart, config: CalculatorConfig) -> None:
        draw = random.Random(start.row.get("seed", start.group_seed))
        self._a, self._b = (draw.randrange(10 ** (config.digits - 1), 10**config.digits) for _ in range(2))
        self._calls = 0

    async def reset(self) -> str:
        """Returns the question."""
        return f"{self._a} times {self._b} ?"

    async def step(self, action: Action) -> StepResult:
        """Returns the results of calls; any other response ends the episode, with reward 1 for the right product."""
        if action.tool_calls:
            self._calls += len(action.tool_calls)
            results = [_result(call) for call in action.tool_calls]
            return StepResult(observation=[{"role": "tool", "content": text} for text in results])
        if action.parse_error:
            return StepResult(observation=action.parse_error)
        numbers = _DIGITS.findall(action.content)
        right = bool(numbers) and int(numbers[-1].replace(",", "")) == self._a * self._b
        return StepResult(reward=float(right), done=True, info={"tool_calls": self._calls})


def _result(call: ToolCall) -> str:
    """Returns the result of a call for the model: the product, or the error in the call."""
    try:
        return str(call_tool([multiply], call))
    except ToolMistake as mistake:
        return str(mistake)


def tools(row: Mapping[str, Any], config: CalculatorConfig) -> Sequence[Any]:
    """Returns the calculator, or an empty list."""
    return [multiply] if config.tool else []


def check(config: CalculatorConfig) -> None:
    """Raises ValueError for an invalid number of digits."""
    if not 1 <= config.digits <= 9:
        raise ValueError(f"env.digits={config.digits}: a factor has 1 to 9 digits.")


SPEC = EnvSpec(
    name="calculator",
    summary="a product of large numbers, with a calculator as a tool",
    config=CalculatorConfig,
    open=Calculator,
    tools=tools,
    check=check,
)
