"""Tests the adapter with the real package TextArena. Its games draw from Python's global random state."""

from __future__ import annotations

import asyncio
import re

import pytest

pytest.importorskip("textarena", reason="pip install 'relax-core[envs]'")

from envs.textarena import TextArenaConfig, TextArenaGame
from relax_core.contracts.env import Action, BaseInteractionEnv, EpisodeStart, StepResult
from relax_core.registry import find_env
from relax_core.rollout.env_workers.env_workers import EnvWorkers
from relax_core.tools.check_env import main


def say(game: TextArenaGame, text: str) -> StepResult:
    return game.step(Action(text=text, content=text, stopped=True))


def test_mastermind_is_played_to_its_end() -> None:
    """A search over all codes wins the game."""
    game = TextArenaGame(EpisodeStart(row={}, group_seed=5, episode_seed=6), TextArenaConfig())
    assert "4 digits long" in game.reset()
    codes = [f"{n:04d}" for n in range(10_000) if set(f"{n:04d}") <= set("123456") and len(set(f"{n:04d}")) == 4]
    for _ in range(10):
        guess = codes[0]
        step = say(game, f"[{' '.join(guess)}]")
        if step.done:
            break
        black, white = map(int, re.findall(r"(\d) (?:black|white)", step.observation))
        codes = [code for code in codes if answer(code, guess) == (black, white)]
    assert step.done and step.reward == 1.0 and step.info["invalid_move"] == 0.0
    game.close()


def answer(code: str, guess: str) -> tuple[int, int]:
    black = sum(a == b for a, b in zip(code, guess, strict=True))
    return black, len(set(code) & set(guess)) - black


def test_wrong_moves_are_told_and_then_end_the_game() -> None:
    game = TextArenaGame(EpisodeStart(row={}, group_seed=5, episode_seed=6), TextArenaConfig())
    game.reset()
    steps = [say(game, "hm"), say(game, "hm")]
    assert "invalid move" in steps[0].observation and steps[1].done
    assert steps[1].info["invalid_move"] == 1.0


def test_a_game_depends_on_its_seeds_alone_whatever_is_played_beside_it() -> None:
    """The game 2048 draws a tile from the global random state with each move."""

    async def scene() -> None:
        config = TextArenaConfig(game="2048-v0")
        workers = EnvWorkers(find_env("textarena"), config)
        opening = workers.spec(episodes_per_group=1).open
        assert opening is not None

        async def begin(group: int, episode: int) -> BaseInteractionEnv:
            opened = opening(EpisodeStart(row={}, group_seed=group, episode_seed=episode), config)
            env: BaseInteractionEnv = await opened  # type: ignore[misc]
            await env.reset()
            return env

        async def move(env: BaseInteractionEnv, word: str) -> str:
            action = Action(text=f"[{word}]", content=f"[{word}]", stopped=True)
            return str((await env.step(action)).observation)  # type: ignore[misc]

        words = ["left", "up", "left", "up", "left", "up"]
        try:
            alone_game = await begin(1, 2)
            alone = [await move(alone_game, word) for word in words]
            other_games = [await begin(3, 4), await begin(1, 5)]
            again, beside = await begin(1, 2), []
            for word in words:
                for game in other_games:
                    await move(game, word)
                beside.append(await move(again, word))
            assert beside == alone
            differs = await begin(1, 7)
            assert [await move(differs, word) for word in words] != alone
        finally:
            await asyncio.to_thread(workers.close)

    asyncio.run(scene())


def test_it_passes_the_check_in_its_worker_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["textarena", "max_turns=3"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
