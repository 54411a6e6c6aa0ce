"""Plays games of the package TextArena for one player, such as Mastermind-v0."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, IsolatedConfig, StepResult


@dataclass(frozen=True)
class TextArenaConfig(IsolatedConfig):
    """Holds the settings of the adapter; ``game`` is the name of a TextArena game for one player."""

    name: str = "textarena"
    game: str = "Mastermind-v0"
    max_turns: int = 20
    tool_parser: str = "none"


class TextArenaGame(BaseInteractionEnv):
    """Plays one game: the response is the move, and the game's reply is the observation.

    The games draw from Python's global random state, which a worker process isolates for each episode.
    """

    def __init__(self, start: EpisodeStart, config: TextArenaConfig) -> None:
        import textarena

        self._own_move = textarena.ObservationType.PLAYER_ACTION
        self._game = textarena.make(f"{config.game}-raw")  # without wrappers, an observation has only new text
        self._seed = start.group_seed % 2**31

    def reset(self) -> str:
        """Returns the rules and the first position."""
        self._game.reset(num_players=1, seed=self._seed)
        return self._text()

    def step(self, action: Action) -> StepResult:
        """Returns the game's reply to a move; at the end of the game, returns the reward."""
        done, _ = self._game.step(action=action.content or action.text)
        if not done:
            return StepResult(observation=self._text())
        rewards, told = self._game.close()
        own = told.get(0, {})
        info = {key: float(own[key]) for key in ("turn_count", "invalid_move") if key in own}
        return StepResult(reward=float(rewards[0]), done=True, info=info)

    def _text(self) -> str:
        _, messages = self._game.get_observation()
        said: list[Any] = [text for _, text, kind in messages if kind != self._own_move]
        return "\n".join(map(str, said)) or "Go on."


def check(config: TextArenaConfig) -> None:
    """Raises ValueError if the package is missing."""
    if importlib.util.find_spec("textarena") is None:
        raise ValueError("env=textarena needs the package TextArena: pip install 'relax-core[envs]'.")


SPEC = EnvSpec(
    name="textarena",
    summary="games of the package TextArena for one player",
    config=TextArenaConfig,
    open=TextArenaGame,
    check=check,
    isolated=True,
)
