"""An env of several turns: the policy guesses a number from 1 to ``highest``; the env answers higher or lower."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, InteractionConfig, StepResult


@dataclass(frozen=True)
class NumberGuessConfig(InteractionConfig):
    """Holds the settings of the game; ``highest`` is the largest possible number."""

    name: str = "number_guess"
    max_turns: int = 3
    tool_parser: str = "none"
    highest: int = 7


class NumberGuess(BaseInteractionEnv):
    """Plays one game. The first number in a response is the guess. The state is the range of possible numbers.

    With data=seeds, successive rows have successive numbers. All numbers are therefore equally frequent. With other
    data, the number is drawn from the group's seed.
    """

    def __init__(self, start: EpisodeStart, config: NumberGuessConfig) -> None:
        self._config = config
        seed = start.row.get("seed")
        drawn = random.Random(start.group_seed).randrange(config.highest) if seed is None else seed % config.highest
        self._number = 1 + drawn
        self._turns_left = config.max_turns
        self._lowest, self._highest = 1, config.highest

    async def reset(self) -> str:
        """Returns the first observation."""
        return f"guess a number from 1 to {self._config.highest}"

    async def step(self, action: Action) -> StepResult:
        """Returns reward 1 and the end for a right guess, else reward 0 and the answer higher or lower."""
        self._turns_left -= 1
        state = f"{self._lowest}-{self._highest}"
        found = re.search(r"\d+", action.text)
        guess = None if found is None else int(found.group())
        if guess == self._number:
            return StepResult(reward=1.0, done=True, state_key=state)
        if guess is None:
            answer = "no number"
        elif guess < self._number:
            answer, self._lowest = "higher", max(self._lowest, guess + 1)
        else:
            answer, self._highest = "lower", min(self._highest, guess - 1)
        return StepResult(observation=answer, reward=0.0, done=not self._turns_left, state_key=state)

    async def close(self) -> None:
        """Does nothing, because the game holds no resources."""


SPEC = EnvSpec(
    name="number_guess",
    summary="guess a number in a few turns; the env answers higher or lower",
    config=NumberGuessConfig,
    open=NumberGuess,
    state_keys=True,
)
