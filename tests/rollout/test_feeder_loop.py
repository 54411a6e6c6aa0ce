"""Tests the feeder with files, the real tokenizer and the bus's state machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.contracts.algorithm import Offline
from relax_core.contracts.bus import BusClosed
from relax_core.contracts.engine import SamplingParams
from relax_core.data.sources import make_source
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.registry import find_env
from relax_core.rollout.feeder_loop import FeederLoop
from relax_core.rollout.offline_rows import OfflineRows
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rollout_loop import BadRows, RolloutLoopSettings
from tests.rollout.rollout_loop_harness import CONTEXT, STEP_GROUPS, Recorded, ReplayBufferBus, within
from tests.trees import answers_of, tree_of

TASK = "model.task=reverse_digits"
DIGITS = [str(12_345 + 1_111 * number) for number in range(8)]


def feeder(
    folder: Path,
    bus: ReplayBufferBus,
    file: Path,
    bad_rows: BadRows,
    records: list[Recorded],
    kind: Offline = "demonstrations",
) -> tuple[FeederLoop, PromptTokenizer]:
    config = load_config(
        [f"data.path={file}", "data=file", "data.eval_size=0", "eval.every=0", "data.shuffle=false", TASK]
    )
    env = find_env("single_turn")
    tokenizer = PromptTokenizer(folder)
    loop = FeederLoop(
        bus=bus,
        source=make_source(config.data, seed=0, eval_rows=0, offline=kind),
        rows=OfflineRows(tokenizer=tokenizer, kind=kind, max_tokens=CONTEXT),
        prompts=PromptMaker(env=env, env_config=config.env, tokenizer=tokenizer, max_prompt_tokens=CONTEXT),
        settings=RolloutLoopSettings(
            seed=0,
            batch_prompts=STEP_GROUPS,
            sampling=SamplingParams(max_new_tokens=1),
            admit_timeout_s=60.0,
            call_timeout_s=60.0,
            max_failed_groups=None,
        ),
        record=lambda kind, step, values: records.append((kind, step, values)),
        bad_rows=bad_rows,
    )
    return loop, tokenizer


def write(path: Path, *, wrong: Mapping[int, object]) -> Path:
    rows = [{"prompt": f"rev {digits}", "completion": digits[::-1]} for digits in DIGITS]
    lines = [json.dumps(wrong.get(number, row)) for number, row in enumerate(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_become_groups_in_order_and_bad_rows_are_replaced(tiny_folder: Path, tmp_path: Path) -> None:
    """The second row has no answer, and the fifth is longer than the context. Each step has three other rows."""
    wrong = {1: {"prompt": "rev 1", "completion": ""}, 4: {"prompt": "rev " + "1 2 " * 50, "completion": "1"}}
    file, named, records = write(tmp_path / "rows.jsonl", wrong=wrong), list[Sequence[Mapping[str, str]]](), []
    bus = ReplayBufferBus(steps=2, group_size=1)

    async def scene() -> None:
        loop, tokenizer = feeder(tiny_folder, bus, file, BadRows(rows=8, most=0.5, report=named.append), records)
        with pytest.raises(BusClosed):
            await loop.run([])
        trees = [tree_of(bus.rows[uid]) for uid in sorted(bus.rows)]
        texts = [tokenizer.decode(answers_of(tree)[0].tolist()) for tree in trees]
        trained = [digits[::-1] for number, digits in enumerate(DIGITS) if number not in wrong]
        assert [text.removesuffix("<|im_end|>") for text in texts][:6] == trained
        assert all(tree.is_of_data and tree.loss_mask.sum() == 6 for tree in trees)

    asyncio.run(within(scene()))
    counts = bus.core.progress().ledger
    assert counts.dropped == {"bad_row:empty": 1, "too_long": 1}
    assert (counts.trained, counts.lost, counts.trained_twice) == (2 * STEP_GROUPS, 0, 0)
    assert [(row["row"], row["reason"]) for row in named[-1]] == [("1", "bad_row:empty"), ("4", "too_long")]
    assert sum(values["tokens"] for _, _, values in records) == 6 * sum(values["samples"] for _, _, values in records)


def labelled_groups(folder: Path, file: Path, *, steps: int) -> list[tuple[list[str], list[str]]]:
    """Returns the trained and the untrained answers of the groups of a feeder."""
    bus, found = ReplayBufferBus(steps=steps, group_size=2), list[tuple[list[str], list[str]]]()

    async def scene() -> None:
        loop, tokenizer = feeder(folder, bus, file, BadRows(rows=8, most=0.5, report=lambda rows: None), [], "labels")
        with pytest.raises(BusClosed):
            await loop.run([])
        for uid in sorted(bus.rows):
            tree = tree_of(bus.rows[uid])
            answers = [tokenizer.decode(ids.tolist()).removesuffix("<|im_end|>") for ids in answers_of(tree)]
            assert tree.trained_episodes().tolist() == [True, False] and tree.is_of_data
            found.append((answers[:1], answers[1:]))

    asyncio.run(within(scene()))
    return found


def test_labelled_rows_have_the_same_partners_in_every_run(tiny_folder: Path, tmp_path: Path) -> None:
    """The partner is the next row of the file; the row after the second row is unusable, so another row replaces it."""
    rows = [{"prompt": f"rev {digits}", "completion": digits[::-1], "label": len(digits) > 4} for digits in DIGITS]
    rows[2]["label"] = "yes"
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = labelled_groups(tiny_folder, file, steps=2)
    answers = [digits[::-1] for digits in DIGITS]
    numbers = [(answers.index(own[0]), answers.index(other[0])) for own, other in found]
    assert [own for own, _ in numbers][:6] == [0, 1, 3, 4, 5, 6]
    assert all(own != other and other != 2 for own, other in numbers)
    partner = dict(numbers)
    assert [partner[number] for number in (0, 3, 4, 5)] == [1, 4, 5, 6]
    again = labelled_groups(tiny_folder, file, steps=1)
    assert again == found[: len(again)]


def test_too_many_bad_rows_end_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    wrong = {number: {"prompt": "rev 1", "completion": ""} for number in range(8)}
    file = write(tmp_path / "rows.jsonl", wrong=wrong)

    async def scene() -> None:
        bus = ReplayBufferBus(steps=2, group_size=1)
        loop, _ = feeder(tiny_folder, bus, file, BadRows(rows=8, most=0.5, report=lambda rows: None), [])
        with pytest.raises(ValueError, match=r"data\.max_bad_rows=0\.5"):
            await loop.run([])

    asyncio.run(within(scene()))
