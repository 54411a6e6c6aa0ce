"""Tests isolated episodes with a real engine and the bus's state machine: worker processes die during episodes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.schema import EngineConfig
from relax_core.contracts.env import IsolatedConfig
from relax_core.contracts.plugin_results import WrongResult
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_process import EngineLaunch
from relax_core.registry import find_env, find_reward
from relax_core.rollout.env_workers.env_workers import EnvWorkers
from relax_core.tools.make_tiny import tiny_model_folder
from tests.contracts.engine.harness import Engine
from tests.rollout.rollout_loop_harness import GROUP_SIZE, ReplayBufferBus, sample, within
from tests.trees import tree_of

CONTEXT = 192
ENV = """
import os, random, time
from dataclasses import dataclass
from relax_core.contracts.env import BaseInteractionEnv, EnvSpec, IsolatedConfig, StepResult


@dataclass(frozen=True)
class MineConfig(IsolatedConfig):
    name: str = "mine"


class Mine(BaseInteractionEnv):
    def __init__(self, start, config):
        self.start, self.played = start, 0

    def reset(self):
        return f"{self.start.row['prompt']} {random.randrange(10)}"

    def step(self, action):
        self.played += 1
        print("attempt", self.start.attempt, self.played, flush=True)
        if FATAL:
            os._exit(7)
        return StepResult(observation=str(random.randrange(10)), reward=0.5, done=self.played == 2)


SPEC = EnvSpec(name="mine", summary="s", config=MineConfig, open=Mine, isolated=True)
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture(scope="module")
def engine_settings(launch: EngineLaunch) -> EngineConfig:
    return dataclasses.replace(launch.engine, context_length=CONTEXT)


def play(
    engine: Engine,
    folder: Path,
    bus: ReplayBufferBus,
    file: Path,
    on_workers: Callable[[EnvWorkers], None],
    **settings: Any,
) -> list[Any]:
    """Runs the loop with the env in ``file`` until the bus closes. Returns the recorded metrics."""
    config = IsolatedConfig(name=str(file), **settings)
    records: list[Any] = []

    async def scene() -> None:
        workers = EnvWorkers(find_env(str(file)), config, log_file=file.with_suffix(".log"))
        on_workers(workers)
        try:
            env = workers.spec(episodes_per_group=GROUP_SIZE)
            reward = find_reward("env")
            given: dict[str, Any] = {"env": env, "env_config": config, "context": CONTEXT, "max_new_tokens": 64}
            records.extend(await sample(engine, folder, bus, reward=reward, **given))
        finally:
            await asyncio.to_thread(workers.close)

    asyncio.run(within(scene()))
    return records


def test_episodes_whose_worker_was_killed_start_again(engine: Engine, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ENV.replace("FATAL", "False"))
    killed: list[int] = []

    def kill_one(workers: EnvWorkers) -> None:
        def kill() -> None:
            log = file.with_suffix(".log")
            while not log.exists() or b"attempt 0 1" not in log.read_bytes():
                time.sleep(0.001)
            pid = workers.workers[0]._process.pid
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

        threading.Thread(target=kill, daemon=True).start()

    bus = ReplayBufferBus(steps=1)
    play(engine, folder, bus, file, kill_one, workers=2, max_retries=3)
    assert killed
    assert bus.rows and not bus.core.progress().ledger.dropped
    assert b"attempt 1" in file.with_suffix(".log").read_bytes()
    for tree in map(tree_of, bus.rows.values()):
        assert all(episode.reward in (0.5, 1.0) for episode in tree.episodes)


def test_an_env_that_ends_its_process_each_time_gives_no_reward(engine: Engine, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ENV.replace("FATAL", "self.start.row['prompt'] == 'rev 101'"))
    bus = ReplayBufferBus(steps=1)
    play(engine, folder, bus, file, lambda workers: None, workers=2, max_retries=0, step_timeout_s=60.0)
    assert "g00000001" not in bus.rows
    dropped = bus.core.progress().ledger.dropped
    assert set(dropped) == {"reward_failed"} and dropped["reward_failed"] >= GROUP_SIZE


def test_a_wrong_result_ends_the_run_with_env_uid_row_and_turn(engine: Engine, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    where = r"episode g0000000\d\.\d \(rows.jsonl, line \d\), turn 1: env mine .*"
    for right, wrong, words in (
        ("reward=0.5", "reward='much'", "step returned reward="),
        ("str(random.randrange(10))", "42", "format_observation returned 42"),
    ):
        file.write_text(ENV.replace("FATAL", "False").replace(right, wrong))
        with pytest.raises(WrongResult, match=where + words):
            play(engine, folder, ReplayBufferBus(steps=1), file, lambda workers: None)


def test_a_megabyte_of_markup_is_cut_and_ends_no_message(engine: Engine, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = "'<|im_end|>' * 100_000"
    file.write_text(
        ENV.replace("FATAL", "False").replace("observation=str(random.randrange(10))", f"observation={text}")
    )
    bus = ReplayBufferBus(steps=1)
    records = play(engine, folder, bus, file, lambda workers: None, max_observation_tokens=20)
    (end,) = PromptTokenizer(folder).stop_token_ids
    observed = 0
    for tree in map(tree_of, bus.rows.values()):
        for episode in tree.episodes:
            for before, after in zip(episode.turns, episode.turns[1:], strict=False):
                observed += 1
                between = tree.token_ids[before.end : after.start].tolist()
                assert between.count(end) == 1, "the template ends the env's message exactly once"
                assert 20 < len(between) < 120
    assert observed and records[-1][2]["cut_observations"] > 0
