"""The rollout's loop with a real engine, a real reward and the bus's own state machine."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from relax_core.config.compose import load_config
from relax_core.config.schema import Overlong
from relax_core.contracts import columns as c
from relax_core.contracts.bus import Admission, BusTimeout, GroupRow
from relax_core.contracts.checked import WrongResult, checked_algorithm
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.reward import RewardInput, RewardOutput, RewardSpec
from relax_core.contracts.tree import check_tree
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.registry import find_algorithm, find_reward
from relax_core.roles.rollout.rollout_worker import group_advantages
from relax_core.rollout.bad_rows import BadRows
from relax_core.rollout.rewards.reward_failures import RewardsFailed
from relax_core.tools.make_tiny import tiny_model_folder
from tests.contracts.engine.harness import TOKEN, Engine
from tests.rollout.sampler_harness import CONTEXT, GROUP_SIZE, STEP_GROUPS, CoreBus, renamed, sample, within
from tests.trees import prompt_of, rewards_of, tree_of

SOON_S = 60.0  # a deadline for what needs milliseconds; less than the harness's


@pytest.fixture(scope="module")
def tiny_folder() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


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
            assert len(rewards_of(tree_of(row))) == GROUP_SIZE
        tokenizer = PromptTokenizer(tiny_folder)
        assert "rev 101" in tokenizer.decode(prompt_of(tree_of(bus.rows["g00000001"])).tolist())
        assert records
        for source, version, values in records:
            assert (source, version) == ("rollout", 0)
            assert values["samples"] == STEP_GROUPS * GROUP_SIZE
            assert values["tokens"] == sum(int(tree_of(row).lengths.sum()) for row in bus.rows.values())

    asyncio.run(scene())


def test_a_group_is_put_with_its_advantages_where_no_role_makes_them(engine: Engine, tiny_folder: Path) -> None:
    """GRPO's by hand: reward minus the mean, over the unbiased deviation, at each of the sample's tokens."""
    config = load_config()
    advantages = group_advantages(find_algorithm(config.algo.name), config)
    turns = itertools.cycle(range(GROUP_SIZE))

    def in_turns(one: RewardInput, plugin_config: Any) -> RewardOutput:
        return RewardOutput(reward=float(next(turns)), exact=False)

    async def scene() -> None:
        bus = CoreBus(steps=1)
        await sample(engine, tiny_folder, bus, reward=scored(in_turns), advantages=advantages)
        assert len(bus.rows) == STEP_GROUPS
        for row in bus.rows.values():
            tree = tree_of(row)
            rewards = np.array(rewards_of(tree))
            assert set(rewards.tolist()) == {0.0, 1.0}
            relative = (rewards - rewards.mean()) / (rewards.std(ddof=1) + config.algo.std_epsilon)
            assert tree.extras[c.ADVANTAGES] == pytest.approx(np.repeat(relative, tree.lengths), rel=1e-6)

    asyncio.run(scene())


def test_advantages_that_fail_end_the_loop_with_their_cause(engine: Engine, tiny_folder: Path) -> None:
    config = load_config()
    spec = dataclasses.replace(find_algorithm("grpo"), advantages=lambda inputs, plugin_config: inputs.rewards)
    advantages = group_advantages(checked_algorithm(spec), config)

    async def scene() -> None:
        await sample(engine, tiny_folder, CoreBus(steps=1), advantages=advantages)

    with pytest.raises(WrongResult, match="algorithm grpo"):
        asyncio.run(within(scene()))


def test_a_trainer_that_is_busy_for_long_is_waited_for(engine: Engine, tiny_folder: Path) -> None:
    class BusyBus(CoreBus):
        timeouts = 0

        async def admit_async(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
            if self.timeouts < 3:
                self.timeouts += 1
                raise BusTimeout("actor owes the ack of step 0")
            return await super().admit_async(max_groups, worker=worker, timeout_s=timeout_s)

    async def scene() -> None:
        bus = BusyBus(steps=1)
        await sample(engine, tiny_folder, bus)
        assert bus.timeouts == 3 and len(bus.rows) == STEP_GROUPS

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
            assert interrupted.rows[uid].columns[c.TOKEN_IDS] == row.columns[c.TOKEN_IDS]

    asyncio.run(scene())


def test_a_group_without_rewards_is_dropped_with_its_reason(engine: Engine, tiny_folder: Path) -> None:
    def score(given: RewardInput, config: Any) -> RewardOutput:
        return RewardOutput(reward=None if given.row["prompt"] == "rev 101" else 0.5)

    async def scene() -> None:
        # Three rows of the step come from four prompts, since one yields nothing.
        bus = CoreBus(steps=1)
        await sample(engine, tiny_folder, bus, reward=scored(score))
        assert "g00000001" not in bus.rows and len(bus.rows) == STEP_GROUPS
        counts = bus.core.progress().ledger
        assert counts.dropped["reward_failed"] == GROUP_SIZE and counts.lost == 0

    asyncio.run(scene())


TOO_LONG = "rev " + "1 2 " * 50


def test_rows_that_cannot_be_used_end_with_their_reason_and_the_next_take_their_place(
    engine: Engine, tiny_folder: Path
) -> None:
    """Two of the first three rows, and the first of those that follow them. No prompt batch is shorter for it."""
    told: list[Sequence[Mapping[str, str]]] = []

    async def scene() -> None:
        bus = CoreBus(steps=2, on_step=renamed(engine))
        bad_rows = BadRows(rows=1000, most=0.05, report=told.append)
        records = await sample(
            engine, tiny_folder, bus, prompts={1: None, 2: TOO_LONG, 3: None, 6: None}, bad_rows=bad_rows
        )
        assert sorted(bus.rows)[:6] == [f"g{index:08d}" for index in (0, 4, 5, 7, 8, 9)]
        assert {values["samples"] for _, _, values in records} == {STEP_GROUPS * GROUP_SIZE}
        counts = bus.core.progress().ledger
        assert counts.dropped == {"bad_row:answer": 3 * GROUP_SIZE, "too_long": GROUP_SIZE}
        assert (counts.trained, counts.lost, counts.trained_twice) == (2 * STEP_GROUPS * GROUP_SIZE, 0, 0)

    asyncio.run(within(scene()))
    assert [one["row"] for one in told[-1]] == ["1", "2", "3", "6"]
    assert told[-1][0]["text"] == "rows.jsonl, line 2: answer=None is neither text nor a number."
    assert re.match(r"rows.jsonl, line 3: its prompt has \d+ tokens, .* leaves room for 56", told[-1][1]["text"])


def test_bad_rows_end_the_loop_where_they_are_too_many(engine: Engine, tiny_folder: Path) -> None:
    words = (
        "6 of the 6 data rows that were drawn cannot be used, more than data.max_bad_rows=0.05. The first: rows.jsonl"
    )
    with pytest.raises(ValueError, match=words):
        asyncio.run(within(sample_with(engine, tiny_folder, prompts=dict.fromkeys(range(1000)))))


def test_a_prompt_that_is_too_long_ends_the_loop_where_that_is_an_error(engine: Engine, tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: its prompt has .* use data.overlong=drop, which leaves"):
        asyncio.run(within(sample_with(engine, tiny_folder, prompts={1: TOO_LONG}, overlong=Overlong.error)))


def test_a_prompt_that_is_too_long_is_cut_to_what_fits(engine: Engine, tiny_folder: Path) -> None:
    async def scene() -> None:
        bus = CoreBus(steps=1)
        await sample(engine, tiny_folder, bus, prompts={1: TOO_LONG}, overlong=Overlong.truncate_left)
        ids = prompt_of(tree_of(bus.rows["g00000001"])).tolist()
        assert len(ids) == CONTEXT - 8
        text = PromptTokenizer(tiny_folder).decode(ids)
        assert text.startswith("<|im_start|>user") and text.rstrip().endswith("assistant") and "1 2 1 2" in text

    asyncio.run(within(scene()))


def test_a_dropped_group_is_made_up_for_while_an_evaluation_holds_the_next_prompts(
    engine: Engine, tiny_folder: Path
) -> None:
    """The evaluation of version 1 waits for the step that lacks the group."""

    def score(given: RewardInput, config: Any) -> RewardOutput:
        return RewardOutput(reward=None if given.row["prompt"] == "rev 101" else 0.5)

    async def scene() -> None:
        bus = CoreBus(steps=2, on_step=renamed(engine))

        async def gate(version: int) -> None:
            while bus.core.version < version:
                await asyncio.sleep(0.005)

        await sample(engine, tiny_folder, bus, reward=scored(score), gate=gate)
        assert bus.core.progress().ledger.trained == 2 * STEP_GROUPS * GROUP_SIZE

    asyncio.run(within(scene()))


def test_a_reward_that_raises_for_every_row_ends_the_loop(engine: Engine, tiny_folder: Path) -> None:
    def score(given: RewardInput, config: Any) -> RewardOutput:
        raise KeyError("price")

    with pytest.raises(
        RewardsFailed,
        match=r"100% of the answers to the newest 8 data rows.*KeyError: 'price'.*sample g\d+\.\d, rows.jsonl, line \d",
    ):
        asyncio.run(within(sample_with(engine, tiny_folder, reward=scored(score))))


class ArrivalClient(EngineClient):
    """``arrived``: the groups whose responses have all come, in order."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
        self.arrived: list[str] = []
        self._samples: Counter[str] = Counter()

    async def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, **options: Any
    ) -> AsyncIterator[Generated]:
        async for one in super().generate(prompts, params, **options):
            self._samples[one.rid] += 1
            if self._samples[one.rid] == GROUP_SIZE:
                self.arrived.append(one.rid.rpartition("-")[0])
            yield one


@pytest.mark.parametrize("in_order", [False, True])
def test_a_group_whose_rewards_take_long_holds_up_no_other(engine: Engine, tiny_folder: Path, in_order: bool) -> None:
    """The rewards of the group that comes first wait for the others: until those are on the bus or, where groups are
    handed on in order, until their rewards are there.
    """
    client = ArrivalClient(engine)
    others_are_there = threading.Event()
    scores: Counter[str] = Counter()
    put: list[str] = []

    def traced_put(rows: Sequence[GroupRow]) -> None:
        put.extend(row.group_uid for row in rows)
        if not in_order and len(put) == STEP_GROUPS - 1:
            others_are_there.set()

    def score(given: RewardInput, config: Any) -> RewardOutput:
        group = given.uid.rpartition(".")[0]
        if group == client.arrived[0]:
            assert others_are_there.wait(SOON_S)
        scores[group] += 1
        if in_order and sum(scores.values()) == (STEP_GROUPS - 1) * GROUP_SIZE:
            others_are_there.set()
        return RewardOutput(reward=0.5)

    async def scene() -> None:
        bus = CoreBus(steps=1, put=traced_put)
        await sample(engine, tiny_folder, bus, reward=scored(score), in_order=in_order, client=client)
        assert bus.core.progress().ledger.trained == STEP_GROUPS * GROUP_SIZE

    asyncio.run(within(scene()))
    assert len(client.arrived) == STEP_GROUPS
    assert put == client.arrived if in_order else put[-1] == client.arrived[0]


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

        early = False

        async def admit_async(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
            if not self.core.progress().admitted:
                return self.core.admit(max_groups)
            if not self.early:
                self.early = True
                return [Admission(index=9, group_uid="g00000009", min_version=1)]
            return await super().admit_async(max_groups, worker=worker, timeout_s=timeout_s)

    def refuse(rows: Sequence[GroupRow]) -> None:
        raise ValueError("too many bytes")

    async def scene() -> None:
        await sample(engine, tiny_folder, EarlyBus(steps=2, put=refuse), gate=gate)

    with pytest.raises(ValueError, match="too many bytes"):
        asyncio.run(within(scene()))


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
    deadline = time.monotonic() + 120.0
    while engine.client.loads()["running"]:
        assert time.monotonic() < deadline, "the engine works on for nobody"


def test_what_is_over_before_it_could_begin_is_not_generated(engine: Engine, tiny_folder: Path) -> None:
    """The spare groups wait at the gate until the step has been taken without them."""

    class InTwoParts(CoreBus):
        async def admit_async(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
            return await super().admit_async(STEP_GROUPS, worker=worker, timeout_s=timeout_s)

    async def scene() -> None:
        bus = InTwoParts(steps=2, spare_groups=2, surplus="drop", on_step=renamed(engine))
        gated = 0

        async def gate(version: int) -> None:
            nonlocal gated
            gated += 1
            mine = gated
            while mine == 2 and bus.core.version == 0:
                await asyncio.sleep(0.01)
            for _ in range(20):  # turns of the loop, in which the news goes round
                await asyncio.sleep(0)

        records = await sample(engine, tiny_folder, bus, gate=gate, max_aborts=0)
        drawn = sum(values["samples"] for source, _, values in records if source == "rollout")
        assert bus.core.progress().ledger.dropped["over_sampled"] >= 2 * GROUP_SIZE
        assert not {"g00000003", "g00000004"} & set(bus.rows)
        assert drawn == GROUP_SIZE * len(bus.rows)

    asyncio.run(within(scene()))


def test_two_workers_share_the_steps_and_one_that_is_lost_goes_on_with_its_own(
    engine: Engine, tiny_folder: Path
) -> None:
    """The second worker is lost with two groups in hand, whose step waits for them; it is back with its admissions. A
    row that cannot be used holds up no prompt of a worker that is not alone.
    """

    class TracedBus(CoreBus):
        def __init__(self) -> None:
            super().__init__(steps=6, rollout_workers=2, on_step=renamed(engine))
            self.admitted: list[tuple[int, str]] = []
            self.deadlines_s: set[float] = set()

        async def admit_async(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
            self.deadlines_s.add(timeout_s)
            admitted = await super().admit_async(max_groups, worker=worker, timeout_s=timeout_s)
            self.admitted += [(worker, one.group_uid) for one in admitted]
            return admitted

    async def scene() -> None:
        bus, in_hand = TracedBus(), asyncio.Event()

        async def stands_still(version: int) -> None:
            in_hand.set()
            await asyncio.Event().wait()

        second = asyncio.create_task(
            sample(engine, tiny_folder, bus, worker=1, workers=2, gate=stands_still, client=engine.new_client())
        )
        await in_hand.wait()
        first = asyncio.create_task(
            sample(engine, tiny_folder, bus, workers=2, prompts={8: None}, client=engine.new_client())
        )
        while len({uid for worker, uid in bus.admitted if worker == 0}) == 0:
            await asyncio.sleep(0.005)
        second.cancel()
        await asyncio.wait([second])
        assert bus.core.version == 0 and not first.done(), "the step lacks the lost worker's groups"
        reclaimed = bus.core.reclaim(worker=1)
        assert [one.group_uid for one in reclaimed] == [uid for worker, uid in bus.admitted if worker == 1]
        again = sample(
            engine,
            tiny_folder,
            bus,
            worker=1,
            workers=2,
            prompts={8: None},
            reclaimed=reclaimed,
            client=engine.new_client(),
        )
        records = await asyncio.gather(first, again)
        assert all(records), "both of them worked"
        assert len({uid for _, uid in bus.admitted}) == len(bus.admitted), "a group was admitted to both"
        assert 1.0 not in bus.deadlines_s, "a worker waited for the credit of a bad row"
        counts = bus.core.progress().ledger
        assert (counts.trained, counts.open) == (6 * STEP_GROUPS * GROUP_SIZE, 0)
        assert (counts.lost, counts.trained_twice) == (0, 0)
        assert counts.dropped == {"bad_row:answer": GROUP_SIZE}

    asyncio.run(within(scene()))


class TracedClient(EngineClient):
    """``again``: prompts that it was asked to go on with, since they had been aborted."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
        self.again: set[str] = set()

    async def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, **options: Any
    ) -> AsyncIterator[Generated]:
        self.again |= {prompt.rid for prompt in prompts if prompt.generated}
        async for one in super().generate(prompts, params, **options):
            yield one


def versions_of(row: GroupRow) -> list[list[tuple[int, int]]]:
    """(weight version, tokens) of each answer."""
    return [one.turns[0].versions for one in tree_of(row).episodes]


class UntilOneCameBack(CoreBus):
    """The run goes on until a group is here that was aborted and went on with other weights; it ends a step later."""

    def __init__(self, client: TracedClient, **settings: Any) -> None:
        super().__init__(steps=1_000_000, **settings)
        self._client = client
        self.came_back: set[str] = set()

    async def put_async(self, rows: Sequence[GroupRow], *, timeout_s: float) -> None:
        before = bool(self.came_back)
        back = [row for row in rows if f"{row.group_uid}-0" in self._client.again]
        self.came_back |= {row.group_uid for row in back if any(len(versions) > 1 for versions in versions_of(row))}
        if self.came_back and not before:
            self.core.settings = msgspec.structs.replace(self.core.settings, total_steps=self.core.version + 2)
        await super().put_async(rows, timeout_s=timeout_s)


def test_groups_that_are_aborted_at_a_weight_change_come_back_whole(engine: Engine, tiny_folder: Path) -> None:
    """One group is slow: the steps go on without it, until it has been aborted as often as it may be."""

    async def scene() -> None:
        client = TracedClient(engine)
        settings = {"spare_groups": 2, "surplus": "keep", "on_stale": "mask", "on_step": renamed(engine)}
        bus = UntilOneCameBack(client, **settings)
        await sample(engine, tiny_folder, bus, max_aborts=2, max_new_tokens=40, temperature=2.0, client=client)
        for row in bus.rows.values():
            tree = tree_of(row)
            check_tree(tree)
            for versions, length in zip(versions_of(row), tree.lengths.tolist(), strict=True):
                assert sum(tokens for _, tokens in versions) == length
                assert [version for version, _ in versions] == sorted({version for version, _ in versions})
        assert bus.came_back
        counts = bus.core.progress().ledger
        assert (counts.open, counts.lost, counts.trained_twice) == (0, 0, 0)

    asyncio.run(within(scene()))


async def sample_with(
    engine: Engine, folder: Path, *, put: Callable[[Sequence[GroupRow]], None] = lambda rows: None, **changes: Any
) -> None:
    await sample(engine, folder, CoreBus(steps=2, put=put), **changes)


def test_a_run_whose_every_response_is_cut_ends_with_words(engine: Engine, tiny_folder: Path) -> None:
    """With rollout.mask_truncated nothing of it could be trained, and prompts would be replaced for ever."""

    async def scene() -> None:
        bus = CoreBus(steps=1)
        with pytest.raises(ValueError, match=r"64 groups in a row was cut at rollout\.max_new_tokens=1"):
            await sample(engine, tiny_folder, bus, max_new_tokens=1, temperature=0.0, mask_truncated=True)
        counts = bus.core.progress().ledger
        assert not bus.rows and counts.dropped == {"truncated": 63 * GROUP_SIZE} and not counts.lost

    asyncio.run(within(scene()))
