"""A number from 1 to ``highest``, to be guessed: the env answers higher or lower."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, InteractionConfig, StepResult


@dataclass(frozen=True)
class NumberGuessConfig(InteractionConfig):
    name: str = "number_guess"
    max_turns: int = 3
    highest: int = 7


class NumberGuess(BaseInteractionEnv):
    """The data row has no say: the number comes from the group's seed. A guess is the first number in the response."""

    def __init__(self, start: EpisodeStart, config: NumberGuessConfig) -> None:
        self._config = config
        self._number = random.Random(start.group_seed).randint(1, config.highest)
        self._turns_left = config.max_turns

    async def reset(self) -> str:
        return f"guess a number from 1 to {self._config.highest}"

    async def step(self, action: Action) -> StepResult:
        self._turns_left -= 1
        found = re.search(r"\d+", action.text)
        guess = None if found is None else int(found.group())
        if guess == self._number:
            return StepResult(reward=1.0, done=True)
        answer = "no number" if guess is None else "higher" if guess < self._number else "lower"
        return StepResult(observation=answer, reward=0.0, done=not self._turns_left)

    async def close(self) -> None:
        pass


SPEC = EnvSpec(
    name="number_guess",
    summary="guess a number in a few turns; the env answers higher or lower",
    config=NumberGuessConfig,
    open=NumberGuess,
)
