"""A thousand episodes of a real loop, many of which end badly: every token that the engine sampled is in an account."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.bus import CompleteGroup
from relax_core.contracts.engine import Generated, PromptRequest
from relax_core.contracts.env import Action, EpisodeStart, InteractionConfig, StepResult
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.pool.engine_pool import EnginePool
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.registry import find_reward
from relax_core.rollout import rollout_loop
from relax_core.rollout.episodes.group_assembly import DroppedGroup, complete_episodes
from relax_core.rollout.episodes.played_group import EarlyEnds
from relax_core.tools.make_tiny import tiny_model_folder
from tests.contracts.engine.harness import TOKEN, Engine
from tests.rollout.episodes.test_episodes import CONTEXT, Echo, env_of
from tests.rollout.rollout_loop_harness import CoreBus, renamed, sample, within
from tests.trees import tree_of

STEPS, GROUPS, GROUP_SIZE = 16, 4, 16  # at least 1,024 episodes
CONFIG = InteractionConfig(
    name="mine", max_turn_tokens=8, max_turns=4, step_timeout_s=1.0, episode_timeout_s=60.0, max_retries=1
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture
def engine(start_engine: Callable[..., Engine], launch: EngineLaunch, folder: Path) -> Engine:
    return start_engine(model_folder=folder, engine=dataclasses.replace(launch.engine, context_length=CONTEXT))


class Troubled(Echo):
    """Fails, hangs, rewrites its history, or answers at length, each now and then, by the episode's seed."""

    turns = 4

    def __init__(self, start: EpisodeStart, config: InteractionConfig) -> None:
        super().__init__(start, config)
        self.draw = random.Random(start.episode_seed + start.attempt)

    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        step, chance = super().step(action), self.draw.random()
        if chance < 0.06:
            raise OSError("the game server is gone")
        if chance < 0.08:
            await asyncio.Event().wait()
        if chance < 0.16:
            return dataclasses.replace(step, context_edit=[{"role": "user", "content": "rev 12"}])
        if chance < 0.20:
            return dataclasses.replace(step, observation="9" * 120)
        if chance < 0.24:
            await asyncio.sleep(0.1)
        return step


class CountingClient(EngineClient):
    """Counts the sampled tokens that came from the engine, by the name of their request."""

    counted: Counter[str]

    async def generate(self, prompts: Sequence[PromptRequest], *given: Any, **more: Any) -> AsyncIterator[Generated]:
        async for one in super().generate(prompts, *given, **more):
            self.counted[prompts[one.prompt].rid] += len(one.output_ids)
            yield one


def test_each_token_of_a_thousand_episodes_is_trained_or_counted_with_its_reason(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures, time-outs, a quorum, stale and cut episodes, rewritten histories, and aborts at each weight change."""
    client = CountingClient(engine.process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
    client.counted = Counter()
    given_up: set[str] = set()
    ended: Counter[str] = Counter()
    groups: dict[int, tuple[dict[str, int], CompleteGroup | DroppedGroup]] = {}
    cancel = EnginePool.cancel

    async def noted_cancel(pool: EnginePool, rids: Sequence[str]) -> None:
        given_up.update(rids)
        await cancel(pool, rids)

    def noted_group(**given: Any) -> CompleteGroup | DroppedGroup:
        counts: dict[str, int] = {}
        account = given.pop("account")
        done = complete_episodes(**given, account=counts.update)
        account(counts)
        groups[given["index"]] = (counts, done)
        ended.update(one.ended for one in given["episodes"])
        return done

    monkeypatch.setattr(EnginePool, "cancel", noted_cancel)
    monkeypatch.setattr(rollout_loop, "complete_episodes", noted_group)
    bus = CoreBus(steps=STEPS, groups_per_step=GROUPS, group_size=GROUP_SIZE, max_staleness=1, on_step=renamed(engine))
    reward = find_reward("env")
    play = sample(
        engine,
        folder,
        bus,
        client=client,
        reward=reward,
        env=env_of(Troubled),
        env_config=CONFIG,
        ends=EarlyEnds(quorum=0.75, most_lag=1),
        context=CONTEXT,
        max_new_tokens=24,
        max_aborts=1,
        mask_truncated=True,
    )
    asyncio.run(within(play))  # type: ignore[arg-type]

    sampled: Counter[str] = Counter()  # by the group's uid, counted at the engine's client
    for rid, tokens in client.counted.items():
        if rid not in given_up:  # its episode ended while the request was under way
            sampled[rid[: len("g00000000")]] += tokens
    seen: Counter[str] = Counter()
    for index, (counts, done) in groups.items():
        assert counts["sampled"] == sampled[f"g{index:08d}"], (index, counts)
        assert counts["sampled"] == sum(count for name, count in counts.items() if name != "sampled")
        trained = int(tree_of(done).loss_mask.sum()) if isinstance(done, CompleteGroup) else 0
        assert counts["trained"] == trained
        seen.update(counts)
    assert ended.total() >= 1000
    books = bus.core.progress().ledger
    assert books.trained + sum(books.dropped.values()) + books.open == books.issued and not books.lost
    wanted = {"env_done", "env_failed", "step_timeout", "turn_cut", "straggler"}
    assert wanted <= ended.keys(), ended
    assert all(seen[name] for name in ("trained", "not_chosen", "no_reward", "masked")), seen
    print(ended, seen, books)
