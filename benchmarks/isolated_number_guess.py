"""Runs the games of number_guess in env workers, for `benchmarks.chaos` and `benchmarks.episode_times`."""

from __future__ import annotations

import dataclasses

from envs.number_guess import NumberGuess, NumberGuessConfig
from relax_core.contracts.env import EnvSpec, IsolatedConfig


@dataclasses.dataclass(frozen=True)
class IsolatedNumberGuessConfig(NumberGuessConfig, IsolatedConfig):
    """Holds the settings of the game and of its worker processes."""

    name: str = "isolated_number_guess"


SPEC = EnvSpec(
    name="isolated_number_guess",
    summary="number_guess in worker processes",
    config=IsolatedNumberGuessConfig,
    open=NumberGuess,
    isolated=True,
)
