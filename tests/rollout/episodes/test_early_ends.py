"""Tests episodes that end early: stragglers after a quorum, and episodes that are too old for training."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.schema import EngineConfig
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.env import Action, BaseInteractionEnv, EpisodeStart, InteractionConfig, StepResult
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.engine_process import EngineLaunch
from relax_core.registry import find_reward
from relax_core.rollout.episodes.episode_player import EpisodePlayer
from relax_core.rollout.episodes.episode_records import (
    EpisodeRecord,
    GroupMetrics,
    played_values,
    score_episodes,
)
from relax_core.rollout.episodes.group_assembly import complete_group
from relax_core.rollout.episodes.group_player import EarlyEnds
from relax_core.rollout.episodes.shared_requests import SharedRequests
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.tools.make_tiny import tiny_model_folder
from tests.contracts.engine.harness import Engine
from tests.responses import admitted
from tests.rollout.episodes.test_episodes import CONTEXT, Echo, env_of
from tests.trees import tree_of

EPISODES = 4
ROW = {"prompt": "rev 100", "answer": "001"}


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture(scope="module")
def engine_settings(launch: EngineLaunch) -> EngineConfig:
    return dataclasses.replace(launch.engine, context_length=CONTEXT)


def play_group(
    engine: Engine,
    folder: Path,
    kind: Callable[[EpisodeStart, Any], BaseInteractionEnv],
    ends: EarlyEnds,
    *,
    evaluation: str = "",
) -> list[EpisodeRecord]:
    """Plays one group of `EPISODES` episodes and scores it."""
    tokenizer, env = PromptTokenizer(folder), env_of(kind)
    client = engine.new_client()
    sampling = SamplingParams(n=EPISODES, max_new_tokens=64, stop_token_ids=tokenizer.stop_token_ids)
    config = InteractionConfig(name="mine", max_turn_tokens=8, on_turn_cut="continue")
    prompts = PromptMaker(env=env, env_config=config, tokenizer=tokenizer, max_prompt_tokens=CONTEXT - 64)

    async def client_for(number: int, on_policy: bool) -> Any:
        return client

    async def scene(rewards: RewardPool) -> list[EpisodeRecord]:
        player = EpisodePlayer(
            env=env,
            env_config=config,
            prompts=prompts,
            pool=EnginePool(1, client_for, timeout_s=60.0),
            sampling=sampling,
            seed=0,
            ends=ends,
        )
        start = admitted(3, ROW, rid="g3", evaluation=evaluation)
        try:
            async with asyncio.TaskGroup() as tasks:
                records = await player.play(start, tasks)
            await score_episodes(records, rewards, row=ROW, where="row 3")
            return records
        finally:
            await client.aclose()

    reward = find_reward("env")
    with RewardPool(reward, reward.config(name="env", timeout_s=5.0), workers=1) as rewards:
        played = asyncio.run(asyncio.wait_for(scene(rewards), 120.0))
        assert rewards.failures.share == 0.0, "an early end does not count as a failed reward"
    return played


class SlowFirst(Echo):
    """An env: the first env of a group hangs in its second turn."""

    opened: list[SlowFirst]

    def __init__(self, start: EpisodeStart, config: Any) -> None:
        super().__init__(start, config)
        self.slow = not self.opened
        self.opened.append(self)

    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        if self.slow and self.played == 1:
            await asyncio.Event().wait()
        return super().step(action)


def test_a_quorum_completes_a_group(engine: Engine, folder: Path) -> None:
    class Slow(SlowFirst):
        opened: list[SlowFirst] = []

    records = play_group(engine, folder, Slow, EarlyEnds(quorum=0.75))
    late = [record for record in records if record.ended == "straggler"]
    assert len(late) == 1 and len(late[0].turns) == 2
    assert [record.ended for record in records if record not in late] == ["env_done"] * 3
    assert all(env.closed for env in Slow.opened), "the env of the straggler is closed"
    values = played_values([GroupMetrics.of(records, reward_s=0.0)])
    assert (values["ended/straggler"], values["straggler_turns"]) == (0.25, 2.0)

    accounts: dict[str, int] = {}
    done = complete_group(index=3, episodes=records, account=accounts.update)
    tree = tree_of(done)  # type: ignore[arg-type]
    assert [episode.uid for episode in tree.episodes] == [record.uid for record in records if record not in late]
    assert done.dropped == {late[0].uid: "straggler"}  # type: ignore[union-attr]
    assert accounts["no_reward"] == late[0].sampled_tokens > 0


def test_a_group_waits_for_no_engine_that_ends_the_requests_of_stragglers(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines get one cancel call for all stragglers, and may respond after the group is complete."""
    told: list[list[str]] = []
    complete = asyncio.Event()
    generate, play = SharedRequests.generate, EpisodePlayer.play

    async def hanging(self: SharedRequests, request: PromptRequest, **given: Any) -> Generated:
        if request.rid in ("g3.2.1", "g3.3.1"):
            await asyncio.Event().wait()
        return await generate(self, request, **given)

    async def played(self: EpisodePlayer, *given: Any, **more: Any) -> list[EpisodeRecord]:
        records = await play(self, *given, **more)
        complete.set()
        return records

    async def cancel(self: EnginePool, rids: Sequence[str]) -> None:
        told.append(sorted(rids))
        await asyncio.wait_for(complete.wait(), 60.0)

    monkeypatch.setattr(SharedRequests, "generate", hanging)
    monkeypatch.setattr(EpisodePlayer, "play", played)
    monkeypatch.setattr(EnginePool, "cancel", cancel)
    records = play_group(engine, folder, Echo, EarlyEnds(quorum=0.5))
    assert [record.ended for record in records] == ["env_done"] * 2 + ["straggler"] * 2
    assert told == [["g3.2.1", "g3.3.1"]]


class NewWeights(Echo):
    """An env that changes the engine to version 3 after the first responses of all episodes."""

    turns = 3
    engine: Engine
    first_responses: threading.Barrier
    renaming = threading.Lock()

    def step(self, action: Action) -> StepResult:  # the steps run in threads
        if self.played == 0:
            self.first_responses.wait(60.0)
        with self.renaming:
            if self.engine.version < 3:
                self.engine.post("/update_weight_version", {"new_version": 3})
        return super().step(action)


@pytest.mark.parametrize(
    ("ends", "evaluation", "wanted", "turns"),
    [
        (EarlyEnds(max_lag=2), "", "stale", 2),
        (EarlyEnds(max_lag=3), "", "env_done", 3),
        (EarlyEnds(), "", "env_done", 3),
        (EarlyEnds(max_lag=2), "eval", "env_done", 3),
    ],
)
def test_an_episode_too_old_to_be_trained_ends_at_its_next_turn(
    engine: Engine,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    ends: EarlyEnds,
    evaluation: str,
    wanted: str,
    turns: int,
) -> None:
    class Renamed(NewWeights):
        first_responses = threading.Barrier(EPISODES)

    Renamed.engine = engine
    with caplog.at_level(logging.WARNING):
        records = play_group(engine, folder, Renamed, ends, evaluation=evaluation)
    assert [record.ended for record in records] == [wanted] * EPISODES
    played = [len(record.turns) for record in records]
    assert max(played) == turns
    if wanted == "env_done":  # a stale episode may learn the new version from another episode's second response
        assert played == [turns] * EPISODES
    told = [message for message in caplog.messages if "too old to be trained" in message]
    assert len(told) == (wanted == "stale"), "the log says once what to change"
    if wanted == "stale":
        accounts: dict[str, int] = {}
        done = complete_group(index=3, episodes=records, account=accounts.update)
        assert done.reason == "stale"  # type: ignore[union-attr]
        assert accounts["stale"] == accounts["sampled"] > 0


def test_how_many_episodes_a_quorum_needs() -> None:
    assert [EarlyEnds(quorum=share).needed(16) for share in (1.0, 0.75, 0.7, 0.1)] == [16, 12, 12, 2]
