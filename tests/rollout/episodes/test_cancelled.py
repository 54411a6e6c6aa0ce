"""Tests all ends of an episode, and cancelled or aborted groups, with a real engine."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from relax_core.config.schema import EngineConfig
from relax_core.contracts.bus import Admission, BusClosed, VersionChange
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.env import (
    REWARDED_ENDS,
    Action,
    BaseInteractionEnv,
    Ended,
    EpisodeStart,
    InteractionConfig,
    IsolatedConfig,
    StepResult,
)
from relax_core.contracts.tree import group_uid
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.observe.sample_index import SampleIndex
from relax_core.observe.sample_log import SampleLog
from relax_core.registry import find_env, find_reward
from relax_core.rollout.env_workers.env_workers import EnvWorkers
from relax_core.rollout.episodes.env_calls import EnvCalls, EnvTooSlow
from relax_core.rollout.episodes.episode_player import EpisodePlayer
from relax_core.rollout.episodes.episode_records import EpisodeRecord
from relax_core.rollout.partial_rollout import WeightUpdateHandler
from relax_core.rollout.prompt_tokens import AdmittedPrompt, PromptMaker
from tests.contracts.engine.harness import TOKEN, Engine
from tests.responses import admitted
from tests.rollout.episodes.test_episodes import CONTEXT, Echo, env_of, play
from tests.rollout.rollout_loop_harness import GROUP_SIZE, ReplayBufferBus, renamed, sample, within

EPISODES = 2
DEADLINE_S = 60.0
INDEX = 3


@pytest.fixture(scope="module")
def engine_settings(launch: EngineLaunch) -> EngineConfig:
    return dataclasses.replace(launch.engine, context_length=CONTEXT)


class TracedClient(EngineClient):
    """Records the ids of the prompts that it sends."""

    asked: list[str]

    async def generate(self, prompts: Sequence[PromptRequest], *given: Any, **more: Any) -> AsyncIterator[Generated]:
        self.asked += [prompt.rid for prompt in prompts]
        async for response in super().generate(prompts, *given, **more):
            yield response


def new_client(engine: Engine) -> TracedClient:
    client = TracedClient(engine.process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
    client.asked = []
    return client


def player_of(
    client: EngineClient, folder: Path, kind: Callable[[EpisodeStart, Any], BaseInteractionEnv], **keys: Any
) -> tuple[EpisodePlayer, EnginePool]:
    tokenizer, env, new = PromptTokenizer(folder), env_of(kind), keys.pop("new", 64)
    config = InteractionConfig(name="mine", **{"max_retries": 0, **keys})

    async def client_for(number: int, on_policy: bool) -> Any:
        return client

    pool = EnginePool(1, client_for, timeout_s=60.0)
    player = EpisodePlayer(
        env=env,
        env_config=config,
        prompts=PromptMaker(env=env, env_config=config, tokenizer=tokenizer, max_prompt_tokens=CONTEXT - new),
        pool=pool,
        sampling=SamplingParams(n=EPISODES, max_new_tokens=new, stop_token_ids=tokenizer.stop_token_ids),
        seed=0,
    )
    return player, pool


def group_start() -> AdmittedPrompt:
    return admitted(INDEX, {"prompt": "rev 100", "answer": "001"}, rid="g3")


# -- all ends ----------------------------------------------------------------------------------------------------------
class Endless(Echo):
    turns = 99


class Wordy(Endless):
    def step(self, action: Action) -> StepResult:
        return dataclasses.replace(super().step(action), observation="9" * 100)


class Hangs(Echo):
    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        await asyncio.Event().wait()
        raise AssertionError


class Raises(Echo):
    def step(self, action: Action) -> StepResult:
        raise OSError("gone")


GO_ON = {"max_turn_tokens": 4, "on_turn_cut": "continue"}
ENDS: dict[Ended, tuple[type[Echo], dict[str, Any]]] = {
    "env_done": (Echo, GO_ON),
    "max_turns": (Endless, {"max_turns": 2, **GO_ON}),
    "token_budget": (Endless, {"new": 6, **GO_ON, "max_turns": 99}),
    "context_full": (Wordy, {"max_turns": 99, **GO_ON}),
    "turn_cut": (Endless, {"max_turn_tokens": 1}),
    "step_timeout": (Hangs, {"step_timeout_s": 0.2, **GO_ON}),
    "env_failed": (Raises, GO_ON),
    "episode_timeout": (Hangs, {"episode_timeout_s": 0.2, **GO_ON}),
}
ONE_TURN = {"stop", "length"}
ELSEWHERE = {"cancelled", "straggler", "stale", "bad_media"}  # see test_early_ends.py, test_episodes.py


def test_each_end_of_the_closed_list(engine: Engine, tiny_folder: Path) -> None:
    async def scene() -> None:
        for wanted, (kind, keys) in ENDS.items():
            client = new_client(engine)
            player, _ = player_of(client, tiny_folder, kind, **keys)
            try:
                async with asyncio.TaskGroup() as tasks:
                    records = await player.play(group_start(), tasks)
            finally:
                await client.aclose()
            ended = {record.ended for record in records}
            assert wanted in ended if wanted == "turn_cut" else ended == {wanted}, f"{wanted}: {ended}"
            assert all(bool(record.failed) == (record.ended not in REWARDED_ENDS) for record in records)

    asyncio.run(within(scene()))
    assert set(get_args(Ended)) == ENDS.keys() | ELSEWHERE | ONE_TURN


# -- cancelled groups --------------------------------------------------------------------------------------------------
def test_over_sampling_cancels_the_episodes_of_a_group_with_their_calls(
    engine: Engine, tiny_folder: Path, tmp_path: Path
) -> None:
    """One episode of the spare group waits for its env, the other episode continues. The samples of both are logged."""
    opened: list[Odd] = []
    calls: list[str] = []

    class Odd(Echo):
        def __init__(self, start: EpisodeStart, config: Any) -> None:
            super().__init__(start, config)
            self.spare = start.row["prompt"] == "rev 103"
            self.waits = self.spare and not any(env.spare for env in opened)
            opened.append(self)

        async def step(self, action: Action) -> StepResult:  # type: ignore[override]
            if self.spare:
                try:
                    await asyncio.sleep(600.0 if self.waits else 0.05)
                finally:
                    calls.append("ended")
                return dataclasses.replace(super().step(action), done=False)
            return super().step(action)

    bus = ReplayBufferBus(steps=2, spare_groups=1, surplus="drop", on_step=renamed(engine))
    samples = SampleLog(tmp_path, worker="w", first=1, every=1, max_bytes=2**30)
    records = play(engine, tiny_folder, bus, env_of(Odd), max_aborts=0, max_new_tokens=64, samples=samples)
    samples.close(timeout_s=DEADLINE_S)
    index = SampleIndex(tmp_path, None)
    index.refresh()
    lost = index.find({"state": "made"})[1]
    assert "g00000003" in {row["group_uid"] for row in lost}
    assert not {row["group_uid"] for row in lost} & bus.rows.keys()
    assert {row["group_uid"] for row in index.find({"state": "put"})[1]} == bus.rows.keys()
    assert "g00000003" not in bus.rows
    assert bus.core.progress().ledger.dropped["over_sampled"] >= GROUP_SIZE
    assert calls and all(env.closed for env in opened), "every env is closed"
    episodes = sum(values["samples"] * values.get("ended/cancelled", 0.0) for _, _, values in records)
    assert episodes >= GROUP_SIZE, "the episodes of the spare group are counted"
    assert records[-1][2]["tokens/dropped"] > 0, "the tokens of the spare group are counted"
    deadline = time.monotonic() + DEADLINE_S
    while engine.client.loads()["running"]:
        assert time.monotonic() < deadline, "the engine still runs cancelled requests"


ENV = """
import time
from dataclasses import dataclass
from relax_core.contracts.env import BaseInteractionEnv, EnvSpec, IsolatedConfig, StepResult


@dataclass(frozen=True)
class MineConfig(IsolatedConfig):
    name: str = "mine"


class Mine(BaseInteractionEnv):
    def __init__(self, start, config):
        self.prompt = start.row["prompt"]

    def reset(self):
        print("opened", flush=True)
        return self.prompt

    def step(self, action):
        if self.prompt == "rev 103":
            time.sleep(0.2)
        return StepResult(observation="on", reward=0.5, done=self.prompt != "rev 103")

    def close(self):
        print("closed", flush=True)


SPEC = EnvSpec(name="mine", summary="s", config=MineConfig, open=Mine, isolated=True)
"""


def test_a_group_that_is_given_up_frees_its_places_in_the_env_workers(
    engine: Engine, tiny_folder: Path, tmp_path: Path
) -> None:
    """The env workers have room for two groups, so the second step needs the room of the cancelled group."""
    file, log = tmp_path / "mine.py", tmp_path / "mine.log"
    file.write_text(ENV)
    config = IsolatedConfig(name=str(file), workers=2, episodes_per_worker=GROUP_SIZE, max_turns=99)

    async def scene() -> None:
        workers = EnvWorkers(find_env(str(file)), config, log_file=log)
        try:
            bus = ReplayBufferBus(steps=2, spare_groups=1, surplus="drop", on_step=renamed(engine))
            given: dict[str, Any] = {"env_config": config, "context": CONTEXT, "max_new_tokens": 64, "max_aborts": 0}
            env = workers.spec(episodes_per_group=GROUP_SIZE)
            await sample(engine, tiny_folder, bus, reward=find_reward("env"), env=env, **given)
            assert workers._free == 2 * GROUP_SIZE and not any(worker.open_episodes for worker in workers.workers)
            deadline = time.monotonic() + DEADLINE_S
            while (message := log.read_text()).count("opened") != message.count(
                "closed"
            ):  # two threads may write into one line
                assert time.monotonic() < deadline, message
                await asyncio.sleep(0.01)
        finally:
            await asyncio.to_thread(workers.close)

    asyncio.run(within(scene()))


@pytest.mark.parametrize("in_lockstep", [False, True])
def test_a_stop_cancels_episodes_in_all_their_places(engine: Engine, tiny_folder: Path, in_lockstep: bool) -> None:
    """One episode waits for its env. The other waits for a paused engine, or in lockstep for the first episode."""
    opened: list[Half] = []
    waits, found = asyncio.Event(), list[Sequence[EpisodeRecord]]()

    class Half(Echo):
        def __init__(self, start: EpisodeStart, config: Any) -> None:
            super().__init__(start, config)
            self.waits = not opened
            opened.append(self)

        async def step(self, action: Action) -> StepResult:  # type: ignore[override]
            if self.waits:
                waits.set()
                await asyncio.Event().wait()
            elif not in_lockstep:
                engine.post("/pause_generation", {"mode": "in_place"})
            return super().step(action)

    async def scene() -> None:
        client = new_client(engine)
        player, _ = player_of(client, tiny_folder, Half, **GO_ON)

        async def stopped() -> None:
            async with asyncio.TaskGroup() as tasks:
                lockstep = player.lockstep([group_start()]) if in_lockstep else None
                if lockstep is not None:
                    tasks.create_task(lockstep.run())
                await player.play(
                    group_start(), tasks, given_up=lambda prompt, records: found.append(records), lockstep=lockstep
                )

        playing = asyncio.create_task(stopped())
        await waits.wait()
        while len(client.asked) < (2 if in_lockstep else 3):
            await asyncio.sleep(0.005)
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled()
        await client.aclose()

    asyncio.run(within(scene()))
    (records,) = found
    assert [record.ended for record in records] == ["cancelled"] * EPISODES
    assert len(opened) == EPISODES and all(env.closed for env in opened)


def test_an_env_that_opens_after_its_call_was_given_up_is_closed() -> None:
    may_open, opened = threading.Event(), list[Echo]()

    class Late(Echo):
        def __init__(self) -> None:
            assert may_open.wait(DEADLINE_S)
            super().__init__(None, None)  # type: ignore[arg-type]
            opened.append(self)

    async def scene() -> None:
        with pytest.raises(EnvTooSlow):
            await EnvCalls(timeout_s=0.05)(Late)
        given_up = asyncio.create_task(EnvCalls(timeout_s=DEADLINE_S)(Late))
        await asyncio.sleep(0.05)
        given_up.cancel()
        await asyncio.wait([given_up])
        may_open.set()
        while not (len(opened) == 2 and all(env.closed for env in opened)):
            await asyncio.sleep(0.005)

    asyncio.run(within(scene()))


# -- rollout.partial=abort ---------------------------------------------------------------------------------------------
class OneChange:
    """A bus that changes its weight version once, to version 1."""

    def __init__(self) -> None:
        self.due = asyncio.Event()

    async def wait_version(self, since_version: int, *, worker: int = 0, timeout_s: float) -> VersionChange:
        if since_version == -1:
            return VersionChange(version=0, retired=[])
        if since_version == 1:
            raise BusClosed("all train steps are done")
        await self.due.wait()
        return VersionChange(version=1, retired=[])


def test_an_abort_touches_turns_under_way_and_no_env(engine: Engine, tiny_folder: Path) -> None:
    """At the weight change, an engine generates one episode's second turn, and the other episode's env is in a step."""
    opened: list[Half] = []

    class Half(Echo):
        turns = 3

        def __init__(self, start: EpisodeStart, config: Any) -> None:
            super().__init__(start, config)
            self.first = not opened
            self.resets = 0
            opened.append(self)

        def reset(self) -> Any:
            self.resets += 1
            return super().reset()

        async def step(self, action: Action) -> StepResult:  # type: ignore[override]
            if self.played == 0 and self.first:
                steps.set()
                await changed.wait()
            elif self.played == 0:
                await steps.wait()
                engine.post("/pause_generation", {"mode": "in_place"})
            return super().step(action)

    steps, changed = asyncio.Event(), asyncio.Event()
    client = new_client(engine)

    async def scene() -> list[EpisodeRecord]:
        player, pool = player_of(client, tiny_folder, Half, **GO_ON)
        bus = OneChange()
        handler = WeightUpdateHandler(bus, pool, max_aborts=3, call_timeout_s=60.0)
        handler.admit([Admission(index=INDEX, group_uid=group_uid(INDEX), min_version=0)])
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(player.play(group_start(), tasks, flight=handler))
            assert handler.begin(INDEX, playing.cancel)
            while len(client.asked) < 3:
                await asyncio.sleep(0.005)
            engine.post("/update_weight_version", {"new_version": 1})
            bus.due.set()
            with pytest.raises(BusClosed):
                await handler.run()
            assert handler.aborts == 1
            engine.post("/continue_generation", {})
            changed.set()
        await client.aclose()
        return playing.result()

    records: list[EpisodeRecord] = []

    async def whole() -> None:
        records.extend(await scene())

    asyncio.run(within(whole()))
    assert [env.resets for env in opened] == [1] * EPISODES, "no env is reset"
    assert [env.played for env in opened] == [3] * EPISODES, "each response is stepped once"
    again = [rid for rid, times in Counter(client.asked).items() if times > 1]
    assert len(again) == 1 and again[0].endswith(".1"), "only the running turn is requested again"
    for record in records:
        assert (record.ended, record.restarts, len(record.turns)) == ("env_done", 0, 3)
        assert [set(turn.response.versions.tolist()) for turn in record.turns] == [{0}, {1}, {1}]
