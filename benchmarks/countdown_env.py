"""The env of `benchmarks.long_tail --turns`: each turn requests a countdown, and a slow tool runs between two turns.

    python -m relax_core env=plugin env.name=benchmarks/countdown_env.py env.max_turns=3 env.tool_wait_s=0.5

A row has the prompts of all turns (`benchmarks.countdown_task.prompts_of`). The env returns no reward;
benchmarks/countdown_reward.py scores all turns at the end.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass

from benchmarks.countdown_task import PROMPT_TOKENS, SIGMA, prompts_of
from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, InteractionConfig, StepResult

LONGEST_WAIT = 8.0  # times the mean


@dataclass(frozen=True)
class CountdownEnvConfig(InteractionConfig):
    """Holds the settings of the env. ``tool_wait_s`` is the mean of the uncapped waits for a tool, in seconds."""

    name: str = "countdown_env"
    max_turns: int = 3
    max_observation_tokens: int | None = PROMPT_TOKENS
    tool_parser: str = "none"
    tool_wait_s: float = 0.5


def drawn_waits(count: int, *, mean_s: float, seed: int) -> list[float]:
    """Returns lognormal waits for tools in seconds, with this mean and capped at `LONGEST_WAIT` times the mean."""
    chance = random.Random(f"waits {seed}")
    shares = (chance.lognormvariate(-(SIGMA**2) / 2, SIGMA) for _ in range(count))
    return [mean_s * min(LONGEST_WAIT, share) for share in shares]


class Countdown(BaseInteractionEnv):
    """Runs one episode: shows the prompts in order, with waits for a tool. The episode's seed sets the waits."""

    def __init__(self, start: EpisodeStart, config: CountdownEnvConfig) -> None:
        self._prompts = prompts_of(start.row)
        turns = len(self._prompts)
        if turns > config.max_turns:
            raise ValueError(
                f"env.max_turns={config.max_turns}: a row has prompts of {turns} turns. Set env.max_turns={turns}."
            )
        self._waits_s = drawn_waits(turns - 1, mean_s=config.tool_wait_s, seed=start.episode_seed)
        self._turns = 0

    async def reset(self) -> str:
        """Returns the first prompt."""
        return self._prompts[0]

    async def step(self, action: Action) -> StepResult:
        """Waits for the tool and returns the next prompt. Ends the episode after the last turn."""
        self._turns += 1
        if self._turns == len(self._prompts):
            return StepResult(done=True)
        await asyncio.sleep(self._waits_s[self._turns - 1])
        return StepResult(observation=self._prompts[self._turns])


def check(config: CountdownEnvConfig) -> None:
    """Raises ValueError for negative waits and for waits of env.step_timeout_s or more."""
    if not 0.0 <= config.tool_wait_s < math.inf:
        raise ValueError(f"env.tool_wait_s={config.tool_wait_s:g}: give a time of 0 s or more.")
    longest_s = LONGEST_WAIT * config.tool_wait_s
    if longest_s >= config.step_timeout_s:
        raise ValueError(
            f"env.tool_wait_s={config.tool_wait_s:g}: the longest wait, {longest_s:g} s, is not below "
            f"env.step_timeout_s={config.step_timeout_s:g}. Set env.step_timeout_s={2 * longest_s:g}."
        )


SPEC = EnvSpec(
    name="countdown_env",
    summary="countdowns in several turns with a slow tool between two turns",
    config=CountdownEnvConfig,
    open=Countdown,
    check=check,
)
