"""Tests over-sampling, several rollout workers, and weight changes while a real engine generates groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relax_core.contracts.bus import Admission, Group
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.tree import check_tree
from relax_core.engines.protocol.engine_client import EngineClient
from tests.contracts.engine.harness import TOKEN, Engine
from tests.rollout.rollout_loop_harness import GROUP_SIZE, STEP_GROUPS, ReplayBufferBus, renamed, sample, within
from tests.trees import tree_of


@pytest.mark.parametrize("surplus", ["drop", "keep"])
def test_over_sampled_groups_fill_the_steps_and_end_with_their_reason(
    engine: Engine, tiny_folder: Path, surplus: str
) -> None:
    async def scene() -> None:
        on_stale = "mask" if surplus == "keep" else "drop"
        bus = ReplayBufferBus(steps=4, spare_groups=2, surplus=surplus, on_stale=on_stale, on_step=renamed(engine))
        await sample(engine, tiny_folder, bus, max_aborts=0)
        counts = bus.core.progress().ledger
        assert (counts.trained, counts.open, counts.lost) == (4 * STEP_GROUPS * GROUP_SIZE, 0, 0)
        assert set(counts.dropped) == {"over_sampled"}
        assert counts.dropped["over_sampled"] >= 2 * GROUP_SIZE

    asyncio.run(within(scene()))
    deadline = time.monotonic() + 120.0
    while engine.client.loads()["running"]:
        assert time.monotonic() < deadline, "the engine still runs cancelled requests"


def test_spare_groups_of_a_complete_step_are_not_generated(engine: Engine, tiny_folder: Path) -> None:
    """The spare groups wait at the gate until the step is complete without these groups."""

    class InTwoParts(ReplayBufferBus):
        async def admit(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
            return await super().admit(STEP_GROUPS, worker=worker, timeout_s=timeout_s)

    async def scene() -> None:
        bus = InTwoParts(steps=2, spare_groups=2, surplus="drop", on_step=renamed(engine))
        gated = 0

        async def gate(version: int) -> None:
            nonlocal gated
            gated += 1
            mine = gated
            while mine == 2 and bus.core.version == 0:
                await asyncio.sleep(0.01)
            for _ in range(20):  # iterations of the event loop, so the change is delivered
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
    """The second worker is lost with two groups in flight, and the step waits for these groups. A restarted worker gets
    the same admissions. With several workers, an unusable row does not delay prompts.
    """

    class TracedBus(ReplayBufferBus):
        def __init__(self) -> None:
            super().__init__(steps=6, rollout_workers=2, on_step=renamed(engine))
            self.admitted: list[tuple[int, str]] = []
            self.deadlines_s: set[float] = set()

        async def admit(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
            self.deadlines_s.add(timeout_s)
            admitted = await super().admit(max_groups, worker=worker, timeout_s=timeout_s)
            self.admitted += [(worker, admission.group_uid) for admission in admitted]
            return admitted

    async def scene() -> None:
        bus, in_hand = TracedBus(), asyncio.Event()

        async def is_stopped(version: int) -> None:
            in_hand.set()
            await asyncio.Event().wait()

        second = asyncio.create_task(
            sample(engine, tiny_folder, bus, worker=1, workers=2, gate=is_stopped, client=engine.new_client())
        )
        await in_hand.wait()
        first = asyncio.create_task(
            sample(engine, tiny_folder, bus, workers=2, prompts={8: None}, client=engine.new_client())
        )
        while len({uid for worker, uid in bus.admitted if worker == 0}) == 0:
            await asyncio.sleep(0.005)
        second.cancel()
        await asyncio.wait([second])
        assert bus.core.version == 0 and not first.done(), "the step waits for the lost worker's groups"
        reclaimed = bus.core.reclaim(worker=1)
        assert [admission.group_uid for admission in reclaimed] == [uid for worker, uid in bus.admitted if worker == 1]
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
        assert all(records), "a worker did not work"
        assert len({uid for _, uid in bus.admitted}) == len(bus.admitted), "a group was admitted to both"
        assert 1.0 not in bus.deadlines_s, "a worker waited for the credit of a bad row"
        counts = bus.core.progress().ledger
        assert (counts.trained, counts.open) == (6 * STEP_GROUPS * GROUP_SIZE, 0)
        assert (counts.lost, counts.trained_twice) == (0, 0)
        assert counts.dropped == {"bad_row:answer": GROUP_SIZE}

    asyncio.run(within(scene()))


class TracedClient(EngineClient):
    """Records in ``again`` the prompts that continue after an abort."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
        self.again: set[str] = set()

    async def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, **options: Any
    ) -> AsyncIterator[Generated]:
        self.again |= {prompt.rid for prompt in prompts if prompt.generated}
        async for response in super().generate(prompts, params, **options):
            yield response


def versions_of(row: Group) -> list[list[tuple[int, int]]]:
    """Returns the (weight version, tokens) spans of each answer."""
    return [episode.turns[0].versions for episode in tree_of(row).episodes]


class UntilOneCameBack(ReplayBufferBus):
    """A bus that ends the run one step after it receives a group that was aborted and continued with newer weights."""

    def __init__(self, client: TracedClient, **settings: Any) -> None:
        super().__init__(steps=1_000_000, **settings)
        self._client = client
        self.came_back: set[str] = set()

    async def put(self, rows: Sequence[Group], *, timeout_s: float) -> None:
        before = bool(self.came_back)
        back = [row for row in rows if f"{row.group_uid}-0" in self._client.again]
        self.came_back |= {row.group_uid for row in back if any(len(versions) > 1 for versions in versions_of(row))}
        if self.came_back and not before:
            self.core.settings = msgspec.structs.replace(self.core.settings, total_steps=self.core.version + 2)
        await super().put(rows, timeout_s=timeout_s)


def test_groups_that_are_aborted_at_a_weight_change_come_back_whole(engine: Engine, tiny_folder: Path) -> None:
    """One group is slow. Steps continue without this group until it has reached the maximum number of aborts."""

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
