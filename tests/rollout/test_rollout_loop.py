"""Tests the rollout loop with a real engine, a real reward and the bus's state machine."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.config.compose import load_config
from relax_core.contracts import columns as c
from relax_core.contracts.bus import Admission, BusTimeout, Group
from relax_core.contracts.checked_plugins import checked_algorithm
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.plugin_results import WrongResult
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.registry import find_algorithm
from relax_core.rollout.group_advantages import group_advantages
from relax_core.rollout.rewards.reward_failures import RewardsFailed
from tests.contracts.engine.harness import TOKEN, Engine
from tests.rollout.rollout_loop_harness import (
    GROUP_SIZE,
    STEP_GROUPS,
    ReplayBufferBus,
    sample,
    sample_with,
    scored,
    within,
)
from tests.trees import prompt_of, rewards_of, tree_of

SOON_S = 60.0  # timeout of actions that take milliseconds; shorter than the harness's timeout


def test_every_admitted_group_reaches_the_bus_whole(engine: Engine, tiny_folder: Path) -> None:
    async def scene() -> None:
        bus = ReplayBufferBus(steps=1)
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
    """Computes GRPO by hand: reward minus mean, divided by the unbiased deviation, at each token of the sample."""
    config = load_config()
    advantages = group_advantages(find_algorithm(config.algo.name), config)
    turns = itertools.cycle(range(GROUP_SIZE))

    def in_turns(reward_input: RewardInput, plugin_config: Any) -> RewardOutput:
        return RewardOutput(reward=float(next(turns)), exact=False)

    async def scene() -> None:
        bus = ReplayBufferBus(steps=1)
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
        await sample(engine, tiny_folder, ReplayBufferBus(steps=1), advantages=advantages)

    with pytest.raises(WrongResult, match="algorithm grpo"):
        asyncio.run(within(scene()))


def test_a_trainer_that_is_busy_for_long_is_waited_for(engine: Engine, tiny_folder: Path) -> None:
    class BusyBus(ReplayBufferBus):
        timeouts = 0

        async def admit(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
            if self.timeouts < 3:
                self.timeouts += 1
                raise BusTimeout("actor owes the ack of step 0")
            return await super().admit(max_groups, worker=worker, timeout_s=timeout_s)

    async def scene() -> None:
        bus = BusyBus(steps=1)
        await sample(engine, tiny_folder, bus)
        assert bus.timeouts == 3 and len(bus.rows) == STEP_GROUPS

    asyncio.run(scene())


def test_reclaimed_groups_come_first_and_give_the_same_tokens(engine: Engine, tiny_folder: Path) -> None:
    async def scene() -> None:
        straight = ReplayBufferBus(steps=1)
        await sample(engine, tiny_folder, straight)
        interrupted = ReplayBufferBus(steps=1)
        interrupted.core.admit(STEP_GROUPS)
        reclaimed = interrupted.core.reclaim()
        assert [admission.attempt for admission in reclaimed] == [1, 1, 1]
        await sample(engine, tiny_folder, interrupted, reclaimed=reclaimed)
        for uid, row in straight.rows.items():
            assert interrupted.rows[uid].columns[c.TOKEN_IDS] == row.columns[c.TOKEN_IDS]

    asyncio.run(scene())


def test_a_group_without_rewards_is_dropped_with_its_reason(engine: Engine, tiny_folder: Path) -> None:
    def score(given: RewardInput, config: Any) -> RewardOutput:
        return RewardOutput(reward=None if given.row["prompt"] == "rev 101" else 0.5)

    async def scene() -> None:
        # The step's three rows come from four prompts, because one prompt is unusable.
        bus = ReplayBufferBus(steps=1)
        await sample(engine, tiny_folder, bus, reward=scored(score))
        assert "g00000001" not in bus.rows and len(bus.rows) == STEP_GROUPS
        counts = bus.core.progress().ledger
        assert counts.dropped["reward_failed"] == GROUP_SIZE and counts.lost == 0

    asyncio.run(scene())


def test_a_reward_that_raises_for_every_row_ends_the_loop(engine: Engine, tiny_folder: Path) -> None:
    def score(given: RewardInput, config: Any) -> RewardOutput:
        raise KeyError("price")

    with pytest.raises(
        RewardsFailed,
        match=r"100% of the answers to the newest 8 data rows.*KeyError: 'price'.*sample g\d+\.\d, rows.jsonl, line \d",
    ):
        asyncio.run(within(sample_with(engine, tiny_folder, reward=scored(score))))


class ArrivalClient(EngineClient):
    """A client that records in ``arrived`` the groups with complete responses, in order."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
        self.arrived: list[str] = []
        self._samples: Counter[str] = Counter()

    async def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, **options: Any
    ) -> AsyncIterator[Generated]:
        async for response in super().generate(prompts, params, **options):
            self._samples[response.rid] += 1
            if self._samples[response.rid] == GROUP_SIZE:
                self.arrived.append(response.rid.rpartition("-")[0])
            yield response


@pytest.mark.parametrize("in_order", [False, True])
def test_a_group_whose_rewards_take_long_holds_up_no_other(engine: Engine, tiny_folder: Path, in_order: bool) -> None:
    """The rewards of the first group wait until the other groups are on the bus. With ``in_order`` they wait until the
    rewards of the other groups are computed.
    """
    client = ArrivalClient(engine)
    others_are_there = threading.Event()
    scores: Counter[str] = Counter()
    put: list[str] = []

    def traced_put(rows: Sequence[Group]) -> None:
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
        bus = ReplayBufferBus(steps=1, put=traced_put)
        await sample(engine, tiny_folder, bus, reward=scored(score), in_order=in_order, client=client)
        assert bus.core.progress().ledger.trained == STEP_GROUPS * GROUP_SIZE

    asyncio.run(within(scene()))
    assert len(client.arrived) == STEP_GROUPS
    assert put == client.arrived if in_order else put[-1] == client.arrived[0]


def test_a_put_that_fails_ends_the_loop(engine: Engine, tiny_folder: Path) -> None:
    """Otherwise the groups would never arrive on the bus, and the trainer would wait for them."""

    def refuse(rows: Sequence[Group]) -> None:
        raise ValueError("bus: row g00000000 has too many bytes")

    with pytest.raises(ValueError, match="too many bytes"):
        asyncio.run(within(sample_with(engine, tiny_folder, put=refuse)))


def test_a_failure_is_heard_while_the_next_prompts_wait_at_the_gate(engine: Engine, tiny_folder: Path) -> None:
    """An evaluation may keep the gate closed until the failed groups are trained."""

    async def gate(version: int) -> None:
        if version > 0:
            await asyncio.Event().wait()

    class EarlyBus(ReplayBufferBus):
        """Admits prompts one step ahead, like the bus while the engine still has prompts."""

        early = False

        async def admit(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
            if not self.core.progress().admitted:
                return self.core.admit(max_groups)
            if not self.early:
                self.early = True
                return [Admission(index=9, group_uid="g00000009", min_version=1)]
            return await super().admit(max_groups, worker=worker, timeout_s=timeout_s)

    def refuse(rows: Sequence[Group]) -> None:
        raise ValueError("too many bytes")

    async def scene() -> None:
        await sample(engine, tiny_folder, EarlyBus(steps=2, put=refuse), gate=gate)

    with pytest.raises(ValueError, match="too many bytes"):
        asyncio.run(within(scene()))


def test_prompts_that_arrive_with_a_failure_leave_no_coroutine(
    engine: Engine, tiny_folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    class LateBus(ReplayBufferBus):
        """Returns a result despite its cancellation, like asyncio.wait_for of Python 3.11."""

        async def admit(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
            if not self.core.progress().admitted:
                return self.core.admit(max_groups)
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return [Admission(index=9, group_uid="g00000009", min_version=0)]

    def refuse(rows: Sequence[Group]) -> None:
        raise ValueError("too many bytes")

    with pytest.raises(ValueError, match="too many bytes"):
        asyncio.run(within(sample(engine, tiny_folder, LateBus(steps=2, put=refuse))))
    gc.collect()
    assert not [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)]


def test_a_run_whose_every_response_is_cut_ends_with_words(engine: Engine, tiny_folder: Path) -> None:
    """With rollout.mask_truncated such a run trains no token, and would replace prompts forever."""

    async def scene() -> None:
        bus = ReplayBufferBus(steps=1)
        with pytest.raises(ValueError, match=r"64 groups in a row was cut at rollout\.max_new_tokens=1"):
            await sample(engine, tiny_folder, bus, max_new_tokens=1, temperature=0.0, mask_truncated=True)
        counts = bus.core.progress().ledger
        assert not bus.rows and counts.dropped == {"truncated": 63 * GROUP_SIZE} and not counts.lost

    asyncio.run(within(scene()))
