"""A small OpenEnv server for a game: guess a number from 1 to 9. It needs the package `openenv`.

python guess_server.py --port=8000
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any
from uuid import uuid4

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """A guess."""

    number: int


class Told(Observation):
    text: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, highest: int = 9, **more: Any) -> Told:
        self._number = random.Random(seed).randint(1, highest)
        return Told(text=f"Guess a number from 1 to {highest}.")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Told:
        if action.number < 0:
            raise RuntimeError("the game is broken")
        time.sleep(action.number / 10 if action.number > 20 else 0)
        right = action.number == self._number
        text = "right" if right else "higher" if action.number < self._number else "lower"
        return Told(text=text, done=right, reward=float(right))

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--sessions", type=int, default=8)
    given = parser.parse_args()
    app = create_fastapi_app(GuessEnvironment, Guess, Told, max_concurrent_envs=given.sessions)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")
