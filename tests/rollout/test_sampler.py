"""The rollout's loop with a real engine, a real reward and the bus's own state machine."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts import columns as c
from relax_core.contracts.bus import Admission, BusClosed, GroupRow, VersionChange
from relax_core.contracts.data import DataRow
from relax_core.contracts.engine import SamplingParams
from relax_core.contracts.reward import RewardInput, RewardOutput, RewardSpec
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.pool import EnginePool
from relax_core.engines.process import EngineLaunch
from relax_core.registry import find_env, find_reward
from relax_core.rollout.reward_worker import RewardPool
from relax_core.rollout.sampler import PromptMaker, Sampler, SamplerSettings
from relax_core.rollout.turnover import Turnover
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

    def __init__(
        self,
        *,
        steps: int,
        put: Callable[[Sequence[GroupRow]], None] = lambda rows: None,
        on_step: Callable[[int], None] = lambda version: None,
        **settings: Any,
    ) -> None:
        self._on_step = on_step
        self.core = make_core(
            **{"groups_per_step": STEP_GROUPS, "group_size": GROUP_SIZE, "total_steps": steps, "max_staleness": 0}
            | settings
        )
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
            self._on_step(self.core.version + 1)
            self.core.ack([lease.lease_id], step=self.core.version, dropped={})
        self._changed.set()

    async def wait_version_async(self, since_version: int, *, timeout_s: float) -> VersionChange:
        while True:
            if change := self.core.version_change(since_version):
                return change
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), timeout_s)


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
    max_new_tokens: int = 8,
    temperature: float = 1.0,
    max_aborts: int | None = None,
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
        pool = EnginePool(1, client_for, patience_s=10.0)
        sampler = Sampler(
            bus=bus,
            pool=pool,
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
                burst_prompts=STEP_GROUPS + bus.core.settings.spare_groups,
                sampling=SamplingParams(
                    n=GROUP_SIZE,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    stop_token_ids=tokenizer.stop_token_ids,
                ),
                admit_timeout_s=60.0,
                call_timeout_s=60.0,
            ),
            record=lambda source, version, values: records.append((source, version, values)),
            gate=gate,
            turnover=None if max_aborts is None else Turnover(bus, pool, max_aborts=max_aborts, call_timeout_s=60.0),
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


def renamed(engine: Engine) -> Callable[[int], None]:
    """The weights in force become those of the next version: their push, without the wait."""

    def on_step(version: int) -> None:
        engine.post("/update_weight_version", {"new_version": version})

    return on_step


@pytest.mark.parametrize("surplus", ["drop", "keep"])
def test_over_sampled_groups_fill_the_steps_and_end_with_their_reason(
    engine: Engine, tiny_folder: Path, surplus: str
) -> None:
    async def scene() -> None:
        on_stale = "mask" if surplus == "keep" else "drop"
        bus = CoreBus(steps=4, spare_groups=2, surplus=surplus, on_stale=on_stale, on_step=renamed(engine))
        await sample(engine, tiny_folder, bus, max_aborts=0)
        counts = bus.core.progress().ledger
        assert (counts.trained, counts.open, counts.lost) == (4 * STEP_GROUPS * GROUP_SIZE, 0, 0)
        assert set(counts.dropped) == {"over_sampled"}
        assert counts.dropped["over_sampled"] >= 2 * GROUP_SIZE

    asyncio.run(within(scene()))
    deadline = time.monotonic() + 30.0
    while engine.client.loads()["running"]:
        assert time.monotonic() < deadline, "the engine works on for nobody"


def test_what_is_over_before_it_could_begin_is_not_generated(engine: Engine, tiny_folder: Path) -> None:
    """The spare groups wait at the gate until the step has been taken without them."""

    class InTwoParts(CoreBus):
        async def admit_async(self, max_groups: int, *, timeout_s: float) -> list[Admission]:
            return await super().admit_async(STEP_GROUPS, timeout_s=timeout_s)

    async def scene() -> None:
        bus = InTwoParts(steps=2, spare_groups=2, surplus="drop", on_step=renamed(engine))
        gated = 0

        async def gate(version: int) -> None:
            nonlocal gated
            gated += 1
            while gated == 2 and bus.core.version == 0:
                await asyncio.sleep(0.01)
            for _ in range(20):  # turns of the loop, in which the news goes round
                await asyncio.sleep(0)

        records = await sample(engine, tiny_folder, bus, gate=gate, max_aborts=0)
        drawn = sum(values["samples"] for source, _, values in records if source == "rollout")
        assert bus.core.progress().ledger.dropped["over_sampled"] >= 2 * GROUP_SIZE
        assert not {"g00000003", "g00000004"} & set(bus.rows)
        assert drawn == GROUP_SIZE * len(bus.rows)

    asyncio.run(within(scene()))


def test_groups_that_are_aborted_at_a_weight_change_come_back_whole(engine: Engine, tiny_folder: Path) -> None:
    """One group is slow: the steps go on without it, until it has been aborted as often as it may be."""

    async def scene() -> None:
        bus = CoreBus(steps=16, spare_groups=2, surplus="keep", on_stale="mask", on_step=renamed(engine))
        records = await sample(engine, tiny_folder, bus, max_aborts=2, max_new_tokens=40, temperature=2.0)
        aborts = records[-1][2]["aborts"]
        continued = 0
        for row in bus.rows.values():
            lengths = c.decode_ragged(row.columns[c.RESPONSE_IDS]).lengths
            for spans, length in zip(c.decode_weight_versions(row.columns[c.WEIGHT_VERSIONS]), lengths, strict=True):
                assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
                assert spans[-1].end == length
                assert [span.version for span in spans] == sorted({span.version for span in spans})
                continued += len(spans) > 1
        assert len(c.decode_ragged(row.columns[c.ROLLOUT_LOGPROBS]).flat()) == sum(lengths)
        assert aborts > 0 and continued > 0
        counts = bus.core.progress().ledger
        assert (counts.open, counts.lost, counts.trained_twice) == (0, 0, 0)

    asyncio.run(within(scene()))


async def sample_with(
    engine: Engine, folder: Path, *, put: Callable[[Sequence[GroupRow]], None] = lambda rows: None, **changes: Any
) -> None:
    await sample(engine, folder, CoreBus(steps=2, put=put), **changes)


async def within(call: Awaitable[None]) -> None:
    """A loop that does not hear of a failure would wait for ever."""
    async with asyncio.timeout(60.0):
        await call
