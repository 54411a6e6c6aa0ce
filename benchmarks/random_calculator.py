"""A control for the calculator env: the tool returns random numbers, so tool calls are useless."""

from __future__ import annotations

import dataclasses
import random

from envs.calculator import Calculator, CalculatorConfig, check, tools
from relax_core.contracts.env import Action, EnvSpec, EpisodeStart, StepResult


@dataclasses.dataclass(frozen=True)
class RandomCalculatorConfig(CalculatorConfig):
    """Holds the settings of the task."""

    name: str = "random_calculator"


class RandomCalculator(Calculator):
    """Asks for a product. Each tool call returns a random number with 5 or 6 digits, like the product."""

    def __init__(self, start: EpisodeStart, config: RandomCalculatorConfig) -> None:
        super().__init__(start, config)
        self._draw = random.Random(start.episode_seed)

    async def step(self, action: Action) -> StepResult:
        """Returns the result of the calculator env with random tool results."""
        result = await super().step(action)
        if result.done or isinstance(result.observation, str):
            return result
        shown = [{**message, "content": str(self._draw.randrange(10_000, 1_000_000))} for message in result.observation]
        return dataclasses.replace(result, observation=shown)


SPEC = EnvSpec(
    name="random_calculator",
    summary="calculator with random results",
    config=RandomCalculatorConfig,
    open=RandomCalculator,
    tools=tools,
    check=check,
)
