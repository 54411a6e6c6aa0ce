"""The rollout's loop with a real engine, a real reward and the bus's own state machine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts import columns as c
from relax_core.contracts.bus import Admission, BusClosed, GroupRow
from relax_core.contracts.data import DataRow
from relax_core.contracts.engine import SamplingParams
from relax_core.contracts.reward import RewardInput, RewardOutput, RewardSpec
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.pool import EnginePool
from relax_core.engines.process import EngineLaunch
from relax_core.registry import find_env, find_reward
from relax_core.rollout.reward_worker import RewardPool
from relax_core.rollout.sampler import PromptMaker, Sampler, SamplerSettings
from relax_core.tools.make_tiny import tiny_model_folder
from tests.bus.make_rows import for_actor, make_core
from tests.contracts.engine.harness import Engine

STEP_GROUPS = 3
GROUP_SIZE = 2
CONTEXT = 64


@pytest.fixture(scope="module")
def tiny_folder() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


class CoreBus:
    """`BusCore` in the sampler's own event loop, with a trainer that takes a step as soon as its rows are there."""

    def __init__(self, *, steps: int, put: Callable[[Sequence[GroupRow]], None] = lambda rows: None) -> None:
        self.core = make_core(groups_per_step=STEP_GROUPS, group_size=GROUP_SIZE, total_steps=steps, max_staleness=0)
        self.rows: dict[str, GroupRow] = {}
        self.puts = 0
        self._on_put = put
        self._changed = asyncio.Event()

    async def admit_async(self, max_groups: int, *, timeout_s: float) -> list[Admission]:
        while True:
            if self.core.finished():
                raise BusClosed("all train steps are done")
            if admitted := self.core.admit(max_groups):
                return admitted
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    async def put_async(self, rows: Sequence[GroupRow], *, timeout_s: float) -> None:
        await asyncio.sleep(0)
        self._on_put(rows)
        self.puts += 1
        self.core.put(rows)
        self.rows |= {row.group_uid: row for row in rows}
        self._train()

    async def drop_async(self, group_uid: str, *, reason: str, timeout_s: float) -> None:
        self.core.drop(group_uid, reason=reason)
        self._train()

    def _train(self) -> None:
        request = for_actor(self.core.version, groups=STEP_GROUPS)
        request = type(request)(**{**_fields(request), "columns": (c.REWARDS,)})
        if lease := self.core.lease(request):
            self.core.ack([lease.lease_id], step=self.core.version, dropped={})
        self._changed.set()


def _fields(request: Any) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


class Rows:
    """Prompt ``rev <index>``; ``changes``: other prompts at some indices."""

    def __init__(self, changes: Mapping[int, str]) -> None:
        self._changes = changes

    def row(self, index: int) -> DataRow:
        return {"prompt": self._changes.get(index, f"rev {100 + index}"), "answer": str(100 + index)[::-1]}

    def eval_rows(self) -> list[DataRow]:
        return []


async def no_gate(version: int) -> None: ...


async def sample(
    engine: Engine,
    folder: Path,
    bus: CoreBus,
    *,
    reward: RewardSpec | None = None,
    prompts: Mapping[int, str] | None = None,
    gate: Callable[[int], Awaitable[None]] = no_gate,
    reclaimed: Sequence[Admission] = (),
) -> list[tuple[str, int, Mapping[str, float]]]:
    """Runs the sampler until the bus has had enough; returns what it recorded."""
    client = engine.new_client()
    tokenizer = PromptTokenizer(folder)
    spec = reward or find_reward("reverse_digits")
    env = find_env("single_turn")
    records: list[tuple[str, int, Mapping[str, float]]] = []

    async def client_for(place: int, fresh: bool) -> Any:
        return client

    with RewardPool(spec, spec.knobs(name=spec.name, timeout_s=5.0), workers=1) as rewards:
        sampler = Sampler(
            bus=bus,
            pool=EnginePool(1, client_for, patience_s=10.0),
            prompts=PromptMaker(
                source=Rows(prompts or {}),
                env=env,
                env_knobs=env.knobs(name="single_turn"),
                tokenizer=tokenizer,
                max_prompt_tokens=CONTEXT - 8,
            ),
            rewards=rewards,
            settings=SamplerSettings(
                seed=0,
                prompts_per_step=STEP_GROUPS,
                sampling=SamplingParams(n=GROUP_SIZE, max_new_tokens=8, stop_token_ids=tokenizer.stop_token_ids),
                admit_timeout_s=60.0,
                call_timeout_s=60.0,
            ),
            record=lambda source, version, values: records.append((source, version, values)),
            gate=gate,
        )
        try:
            await sampler.run(reclaimed)
        except BusClosed:
            return records
        finally:
            await client.aclose()
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert not [task for task in left if "Sampler" in repr(task)], left
    raise AssertionError("the sampler ended by itself")


@pytest.fixture
def engine(start_engine: Callable[..., Engine], launch: EngineLaunch, tiny_folder: Path) -> Engine:
    return start_engine(model_folder=tiny_folder, engine=dataclasses.replace(launch.engine, context_length=CONTEXT))


def scored(score: Callable[[RewardInput, Any], RewardOutput]) -> RewardSpec:
    return dataclasses.replace(find_reward("reverse_digits"), score=score)


def test_every_admitted_group_reaches_the_bus_whole(engine: Engine, tiny_folder: Path) -> None:
    async def scene() -> None:
        bus = CoreBus(steps=1)
        records = await sample(engine, tiny_folder, bus)
        assert sorted(bus.rows) == ["g00000000", "g00000001", "g00000002"]
        assert bus.puts <= STEP_GROUPS
        for row in bus.rows.values():
            assert len(row.uids) == GROUP_SIZE and row.versions == [0] * GROUP_SIZE and not row.dropped
            assert len(c.decode_array(row.columns[c.REWARDS])) == GROUP_SIZE
        tokenizer = PromptTokenizer(tiny_folder)
        assert "rev 101" in tokenizer.decode(c.decode_array(bus.rows["g00000001"].columns[c.PROMPT_IDS]).tolist())
        for source, version, values in records:
            assert (source, version) == ("rollout", 0)
            assert values["samples"] == STEP_GROUPS * GROUP_SIZE
            assert values["tokens"] == sum(
                sum(c.decode_ragged(row.columns[c.RESPONSE_IDS]).lengths) for row in bus.rows.values()
            )

    asyncio.run(scene())


def test_reclaimed_groups_come_first_and_give_the_same_tokens(engine: Engine, tiny_folder: Path) -> None:
    async def scene() -> None:
        straight = CoreBus(steps=1)
        await sample(engine, tiny_folder, straight)
        interrupted = CoreBus(steps=1)
        interrupted.core.admit(STEP_GROUPS)
        reclaimed = interrupted.core.reclaim()
        assert [one.attempt for one in reclaimed] == [1, 1, 1]
        await sample(engine, tiny_folder, interrupted, reclaimed=reclaimed)
        for uid, row in straight.rows.items():
            assert interrupted.rows[uid].columns[c.RESPONSE_IDS] == row.columns[c.RESPONSE_IDS]

    asyncio.run(scene())


def test_a_group_without_rewards_is_dropped_with_its_reason(engine: Engine, tiny_folder: Path) -> None:
    def score(given: RewardInput, knobs: Any) -> RewardOutput:
        return RewardOutput(reward=None if given.row["prompt"] == "rev 101" else 0.5)

    async def scene() -> None:
        # Three rows of the step come from four prompts, since one yields nothing.
        bus = CoreBus(steps=1)
        await sample(engine, tiny_folder, bus, reward=scored(score))
        assert "g00000001" not in bus.rows and len(bus.rows) == STEP_GROUPS
        counts = bus.core.progress().ledger
        assert counts.dropped["reward_failed"] == GROUP_SIZE and counts.lost == 0

    asyncio.run(scene())


def test_a_prompt_that_is_too_long_is_named(engine: Engine, tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data row 1: its prompt has \d+ tokens, .* leaves room for 56"):
        asyncio.run(within(sample_with(engine, tiny_folder, prompts={1: "rev " + "1 2 " * 50})))


def test_a_reward_that_raises_ends_the_loop(engine: Engine, tiny_folder: Path) -> None:
    def score(given: RewardInput, knobs: Any) -> RewardOutput:
        raise KeyError("price")

    with pytest.raises(KeyError, match="price"):
        asyncio.run(within(sample_with(engine, tiny_folder, reward=scored(score))))


def test_a_put_that_fails_ends_the_loop(engine: Engine, tiny_folder: Path) -> None:
    """Its rows are lost to the bus: to go on would leave the trainer waiting for them."""

    def refuse(rows: Sequence[GroupRow]) -> None:
        raise ValueError("bus: row g00000000 has too many bytes")

    with pytest.raises(ValueError, match="too many bytes"):
        asyncio.run(within(sample_with(engine, tiny_folder, put=refuse)))


def test_a_failure_is_heard_while_the_next_prompts_wait_at_the_gate(engine: Engine, tiny_folder: Path) -> None:
    """An evaluation may hold the gate until the very groups that failed are trained."""

    async def gate(version: int) -> None:
        if version > 0:
            await asyncio.Event().wait()

    class EarlyBus(CoreBus):
        """Admits one step ahead, as the bus does when the engine is to hold the prompts itself."""

        async def admit_async(self, max_groups: int, *, timeout_s: float) -> list[Admission]:
            if self.core.progress().admitted:
                return [Admission(index=9, group_uid="g00000009", min_version=1)]
            return self.core.admit(max_groups)

    def score(given: RewardInput, knobs: Any) -> RewardOutput:
        raise KeyError("price")

    async def scene() -> None:
        await sample(engine, tiny_folder, EarlyBus(steps=2), reward=scored(score), gate=gate)

    with pytest.raises(KeyError, match="price"):
        asyncio.run(within(scene()))


async def sample_with(
    engine: Engine, folder: Path, *, put: Callable[[Sequence[GroupRow]], None] = lambda rows: None, **changes: Any
) -> None:
    await sample(engine, folder, CoreBus(steps=2, put=put), **changes)


async def within(call: Awaitable[None]) -> None:
    """A loop that does not hear of a failure would wait for ever."""
    async with asyncio.timeout(60.0):
        await call
