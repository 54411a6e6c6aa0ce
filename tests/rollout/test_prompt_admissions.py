"""Tests admissions and unusable data rows, with a real engine, a real reward and the bus's state machine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.choices import Overlong
from relax_core.contracts.bus import Group
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rollout_loop import BadRows
from tests.contracts.engine.harness import Engine
from tests.rollout.rollout_loop_harness import (
    CONTEXT,
    GROUP_SIZE,
    STEP_GROUPS,
    ReplayBufferBus,
    renamed,
    sample,
    sample_with,
    scored,
    within,
)
from tests.trees import prompt_of, tree_of

TOO_LONG = "rev " + "1 2 " * 50


def test_rows_that_cannot_be_used_end_with_their_reason_and_the_next_take_their_place(
    engine: Engine, tiny_folder: Path
) -> None:
    """Two of the first three rows and the first later row are unusable. All prompt batches keep their size."""
    told: list[Sequence[Mapping[str, str]]] = []

    async def scene() -> None:
        bus = ReplayBufferBus(steps=2, on_step=renamed(engine))
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
    assert [bad_row["row"] for bad_row in told[-1]] == ["1", "2", "3", "6"]
    assert told[-1][0]["text"] == "rows.jsonl, line 2: answer=None is neither text nor a number."
    assert re.match(r"rows.jsonl, line 3: its prompt has \d+ tokens, .* leaves room for 56", told[-1][1]["text"])


def test_bad_rows_end_the_loop_where_they_are_too_many(engine: Engine, tiny_folder: Path) -> None:
    message = (
        "6 of the 6 data rows that were drawn cannot be used, more than data.max_bad_rows=0.05. The first: rows.jsonl"
    )
    with pytest.raises(ValueError, match=message):
        asyncio.run(within(sample_with(engine, tiny_folder, prompts=dict.fromkeys(range(1000)))))


def test_a_prompt_that_is_too_long_ends_the_loop_where_that_is_an_error(engine: Engine, tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: its prompt has .* use data.overlong=drop, which leaves"):
        asyncio.run(within(sample_with(engine, tiny_folder, prompts={1: TOO_LONG}, overlong=Overlong.error)))


def test_a_prompt_that_is_too_long_is_cut_to_what_fits(engine: Engine, tiny_folder: Path) -> None:
    async def scene() -> None:
        bus = ReplayBufferBus(steps=1)
        await sample(engine, tiny_folder, bus, prompts={1: TOO_LONG}, overlong=Overlong.truncate_left)
        ids = prompt_of(tree_of(bus.rows["g00000001"])).tolist()
        assert len(ids) == CONTEXT - 8
        text = PromptTokenizer(tiny_folder).decode(ids)
        assert text.startswith("<|im_start|>user") and text.rstrip().endswith("assistant") and "1 2 1 2" in text

    asyncio.run(within(scene()))


def test_a_dropped_group_is_made_up_for_while_an_evaluation_holds_the_next_prompts(
    engine: Engine, tiny_folder: Path
) -> None:
    """The evaluation of version 1 waits for the step of the dropped group."""

    def score(given: RewardInput, config: Any) -> RewardOutput:
        return RewardOutput(reward=None if given.row["prompt"] == "rev 101" else 0.5)

    async def scene() -> None:
        bus = ReplayBufferBus(steps=2, on_step=renamed(engine))

        async def gate(version: int) -> None:
            while bus.core.version < version:
                await asyncio.sleep(0.005)

        await sample(engine, tiny_folder, bus, reward=scored(score), gate=gate)
        assert bus.core.progress().ledger.trained == 2 * STEP_GROUPS * GROUP_SIZE

    asyncio.run(within(scene()))


class Encoded:
    """A prompt maker that is marked as encoding. It requests no items, because its prompts are text only."""

    encoded = 0

    def release(self, owner: str) -> None:
        """Does nothing."""


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_prompts_are_encoded_while_engines_work_and_later_ones_are_admitted_if_no_run_must_be_repeated(
    engine: Engine, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    """At staleness 1 the encoding of the first prompt takes longer than two steps on other prompts.

    At staleness 0 the loop encodes the prompts of step 1 while it computes the rewards of step 0.
    """
    release_items, encoded = asyncio.Event(), set[str]()
    make = PromptMaker.prompt

    async def prompt(self: PromptMaker, row: Any, *, where: str, owner: str) -> Any:
        if max_staleness and owner == "g00000000":
            await release_items.wait()
        encoded.add(owner)
        if max_staleness == 0 and len(encoded) == 2 * STEP_GROUPS:
            release_items.set()
        return await make(self, row, where=where, owner=owner)

    async def score(given: RewardInput, config: Any) -> RewardOutput:
        if max_staleness == 0:
            await release_items.wait()
        return RewardOutput(reward=0.5)

    def put(rows: Sequence[Group]) -> None:
        come.extend(row.group_uid for row in rows)
        if max_staleness and len(come) == STEP_GROUPS:
            release_items.set()

    monkeypatch.setattr(PromptMaker, "prompt", prompt)
    come: list[str] = []

    async def scene() -> None:
        bus = ReplayBufferBus(steps=2, put=put, on_step=renamed(engine), max_staleness=max_staleness)
        await sample(engine, tiny_folder, bus, reward=scored(score), items=Encoded(), in_order=max_staleness == 0)
        assert bus.core.progress().ledger.trained == 2 * STEP_GROUPS * GROUP_SIZE

    asyncio.run(within(scene()))
    assert "g00000000" not in come[:STEP_GROUPS] if max_staleness else come[:STEP_GROUPS] == sorted(come)[:STEP_GROUPS]
