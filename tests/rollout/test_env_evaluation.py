"""Tests the evaluation of an environment of several turns, with a real engine and the real game."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.schema import EngineConfig
from relax_core.contracts.checked_plugins import checked_env
from relax_core.contracts.data import BadRow, DataRow
from relax_core.contracts.engine import SamplingParams
from relax_core.contracts.env import BaseInteractionEnv, EnvSpec, EpisodeStart
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.engine_process import EngineLaunch
from relax_core.registry import find_env, find_reward
from relax_core.rollout.episodes.episode_player import EpisodePlayer
from relax_core.rollout.evaluator import EvalRow, PreparedSet, SetAnswers, evaluation_values, play_sets
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.reward_pool import RewardPool
from tests.contracts.engine.harness import Engine

CONTEXT = 128
NUMBERS = 7


def numbers(name: str) -> PreparedSet:
    """Returns an evaluation set with each number of the game once."""
    rows: list[DataRow] = [{"prompt": f"seed {seed}", "answer": "", "seed": seed} for seed in range(NUMBERS)]
    return PreparedSet(name=name, rows=[EvalRow(row=row, input_ids=[]) for row in rows], bad=[])


def played(
    engine: Engine, folder: Path, sets: Sequence[PreparedSet], *, env: EnvSpec, samples: int = 1, max_bad: float = 0.05
) -> list[SetAnswers]:
    """Evaluates the sets greedily, or with several samples at temperature 1."""
    tokenizer = PromptTokenizer(folder)
    client = engine.new_client()
    sampling = SamplingParams(
        n=samples,
        max_new_tokens=16,
        temperature=float(samples > 1),
        stop_token_ids=tokenizer.stop_token_ids,
    )
    config = env.config(name=env.name)
    prompts = PromptMaker(env=env, env_config=config, tokenizer=tokenizer, max_prompt_tokens=CONTEXT - 16)

    async def client_for(number: int, on_policy: bool) -> Any:
        return client

    async def scene(rewards: RewardPool) -> list[SetAnswers]:
        pool = EnginePool(1, client_for, timeout_s=60.0)
        player = EpisodePlayer(env=env, env_config=config, prompts=prompts, pool=pool, sampling=sampling, seed=0)
        try:
            return await play_sets(sets, version=0, player=player, prompts=prompts, rewards=rewards, max_bad=max_bad)
        finally:
            await client.aclose()

    reward = find_reward("env")
    with RewardPool(reward, reward.config(name="env", timeout_s=5.0), workers=1) as rewards:
        return asyncio.run(asyncio.wait_for(scene(rewards), 120.0))


@pytest.fixture(scope="module")
def engine_settings(launch: EngineLaunch) -> EngineConfig:
    return dataclasses.replace(launch.engine, context_length=CONTEXT)


def test_greedy_episodes_are_the_same_whatever_is_played_beside_them(engine: Engine, tiny_folder: Path) -> None:
    env = find_env("number_guess")
    alone = played(engine, tiny_folder, [numbers("")], env=env)[0]
    both = played(engine, tiny_folder, [numbers("second"), numbers("")], env=env)
    assert both[1].answers == alone.answers
    for (answer,) in alone.answers:
        assert answer.ended in ("env_done", "max_turns", "token_budget") and 1 <= answer.turns <= 3
        lines = answer.text.splitlines()
        assert lines[0] == "user: guess a number from 1 to 7" and lines[-1] == f"[{answer.ended}]"
        assert answer.text.count("assistant: ⟦") == answer.turns and answer.tokens >= answer.turns
        assert answer.exact == any(line.startswith("assistant: ⟦") and line.endswith("⟧ [reward 1]") for line in lines)
        assert answer.exact == (answer.reward == 1.0)
    values = evaluation_values([both[1], both[0]])
    assert values["turns"] == sum(answer.turns for (answer,) in alone.answers) / NUMBERS
    assert sum(value for name, value in values.items() if name.startswith("ended/")) == pytest.approx(1.0)
    assert values["second/turns"] == values["turns"] and values["rows"] == NUMBERS


def test_several_episodes_of_a_row_have_seeds_of_their_own(engine: Engine, tiny_folder: Path) -> None:
    found = played(engine, tiny_folder, [numbers("")], env=find_env("number_guess"), samples=4)[0]
    assert [len(of_row) for of_row in found.answers] == [4] * NUMBERS
    assert any(len({answer.text for answer in of_row}) > 1 for of_row in found.answers)
    assert {"pass@2", "pass@4", "maj@4"} <= found.values().keys()


def test_an_env_that_fails_leaves_answers_without_a_score(engine: Engine, tiny_folder: Path) -> None:
    """The env of one row raises in its first call, and the prompt of one row is too long for a response."""
    game = find_env("number_guess")
    assert game.open is not None
    opens: Any = game.open

    def open_env(start: EpisodeStart, config: Any) -> BaseInteractionEnv:
        if start.row["seed"] == 1:
            raise OSError("no such server")
        env: BaseInteractionEnv = opens(start, config)
        if start.row["seed"] == 2:
            env.reset = lambda: "much too long " * 20  # type: ignore[method-assign]
        return env

    env = checked_env(dataclasses.replace(game, open=open_env))
    found = played(engine, tiny_folder, [numbers("")], env=env, max_bad=0.5)[0]
    assert (found.unscored, len(found.answers)) == (1, NUMBERS - 1)
    assert [type(bad_row) for bad_row in found.of.bad] == [BadRow] and "its prompt has" in str(found.of.bad[0])
    assert found.values()["ended/env_failed"] == pytest.approx(1 / (NUMBERS - 1))
    with pytest.raises(ValueError, match=r"the held-out rows: 1 of 7 rows cannot be used"):
        played(engine, tiny_folder, [numbers("")], env=env)
