"""Tests lockstep: all episodes of a prompt batch send a turn together. A real engine, envs of different speed."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.schema import EngineConfig
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.env import Action, EpisodeStart, InteractionConfig, StepResult
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.rollout.episodes.shared_requests import SharedRequests
from tests.contracts.engine.harness import TOKEN, Engine
from tests.rollout.episodes.test_episodes import CONTEXT, Echo, env_of, play
from tests.rollout.rollout_loop_harness import GROUP_SIZE, STEP_GROUPS, ReplayBufferBus, renamed, within


@pytest.fixture(scope="module")
def engine_settings(launch: EngineLaunch) -> EngineConfig:
    return dataclasses.replace(launch.engine, context_length=CONTEXT)


class TracedClient(EngineClient):
    """Records the prompt ids of each request."""

    asked: list[list[str]]

    async def generate(self, prompts: Sequence[PromptRequest], *given: Any, **more: Any) -> AsyncIterator[Generated]:
        self.asked.append([prompt.rid for prompt in prompts])
        async for response in super().generate(prompts, *given, **more):
            yield response


def rows_of(bus: ReplayBufferBus) -> dict[str, dict[str, bytes]]:
    """Returns the columns of each group (token ids, log-probs, versions) without the times of the turns."""
    return {
        uid: {name: bytes(data) for name, data in row.columns.items() if name != "episodes"}
        for uid, row in bus.rows.items()
    }


def test_an_episode_that_goes_on_while_the_loop_ends_is_cancelled() -> None:
    """The episode's task group is cancelled one iteration after the outer task group. A response arrives in between."""
    request = PromptRequest(rid="g0.0", input_ids=[1], sampling_seed=0)

    async def scene() -> None:
        requests = SharedRequests(None, SamplingParams(max_new_tokens=1))  # type: ignore[arg-type]
        response = asyncio.get_running_loop().create_future()
        waits = asyncio.Event()

        async def episode(tasks: asyncio.TaskGroup) -> None:
            waits.set()
            await response
            await requests.generate(request, tie=0, tasks=tasks)

        async def group(tasks: asyncio.TaskGroup) -> None:
            async with asyncio.TaskGroup() as playing:
                playing.create_task(episode(tasks))

        async def loop() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(group(tasks))

        running = asyncio.create_task(loop())
        await waits.wait()
        running.cancel()
        response.set_result(None)
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(within(scene()))


@pytest.mark.parametrize("fails", [False, True])
def test_requests_and_bits_do_not_depend_on_the_pace_of_the_environments(
    engine: Engine, tiny_folder: Path, fails: bool
) -> None:
    """Some episodes end early, and groups with a failing env are replaced. Replacement groups play after the batch."""
    played = []
    for pace in range(3):
        delays = random.Random(pace)

        class Paced(Echo):
            def __init__(self, start: EpisodeStart, config: Any) -> None:
                super().__init__(start, config)
                self.turns = 1 + start.episode_seed % 4

            async def step(self, action: Action) -> StepResult:  # type: ignore[override]
                await asyncio.sleep(delays.choice((0.0, 0.001, 0.02)))  # noqa: B023  # of this round
                if fails and self.start.row["prompt"] in ("rev 101", "rev 102") and self.played == 1:
                    raise OSError("gone")
                return super().step(action)

        bus = ReplayBufferBus(steps=2, on_step=renamed(engine))
        client = TracedClient(engine.process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
        client.asked = []
        config = InteractionConfig(name="mine", max_retries=0)
        play(engine, tiny_folder, bus, env_of(Paced), env_config=config, client=client, lockstep=True, in_order=True)
        played.append((client.asked, rows_of(bus)))
        engine.post("/update_weight_version", {"new_version": 0})
    first = played[0][0]
    assert len(first[0]) == STEP_GROUPS * GROUP_SIZE, "all start in one request"
    assert sum(map(len, first)) > len(first) > 2, "an episode had a second turn"
    for asked, rows in played[1:]:
        assert sorted(asked) == sorted(first)
        assert rows == played[0][1]
    turns = [[rid for rid in asked if rid.startswith("g0000000")] for asked in first]
    assert all(sorted(turn) == turn for turn in turns), "in the order of the episodes"
