"""The env of `benchmarks.chaos --run episodes`: number_guess in env workers; a step takes some milliseconds."""

from __future__ import annotations

import time
from dataclasses import dataclass

from envs.number_guess import NumberGuess, NumberGuessConfig
from relax_core.contracts.env import Action, EnvSpec, IsolatedConfig, StepResult

STEP_S = 0.005  # so that a killed worker has episodes in the middle of a step


@dataclass(frozen=True)
class IsolatedGuessConfig(NumberGuessConfig, IsolatedConfig):
    """Holds the settings of the game and of its workers."""

    name: str = "isolated_guess"


class IsolatedGuess(NumberGuess):
    """Is a game whose steps take time."""

    async def step(self, action: Action) -> StepResult:
        """Returns the result of the game, late; the wait blocks the worker, as a computation does."""
        time.sleep(STEP_S)
        return await super().step(action)


SPEC = EnvSpec(
    name="isolated_guess",
    summary="number_guess in env workers",
    config=IsolatedGuessConfig,
    open=IsolatedGuess,
    isolated=True,
)
