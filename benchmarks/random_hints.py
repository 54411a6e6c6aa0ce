"""A control for number_guess: the env answers "higher" or "lower" at random. So three guesses find 3 of 7 numbers."""

from __future__ import annotations

import dataclasses
import random

from envs.number_guess import NumberGuess, NumberGuessConfig
from relax_core.contracts.env import Action, EnvSpec, EpisodeStart, StepResult


@dataclasses.dataclass(frozen=True)
class RandomHintsConfig(NumberGuessConfig):
    """Holds the settings of the game."""

    name: str = "random_hints"


class RandomHints(NumberGuess):
    """Runs a game with random hints."""

    def __init__(self, start: EpisodeStart, config: RandomHintsConfig) -> None:
        super().__init__(start, config)
        self._draw = random.Random(start.episode_seed)

    async def step(self, action: Action) -> StepResult:
        """Returns the result of number_guess, with a random hint after a wrong guess."""
        result = await super().step(action)
        if result.observation in ("higher", "lower"):
            return dataclasses.replace(result, observation=self._draw.choice(("higher", "lower")))
        return result


SPEC = EnvSpec(
    name="random_hints",
    summary="number_guess with random hints",
    config=RandomHintsConfig,
    open=RandomHints,
)
