"""Tests of the figures of `benchmarks.long_tail`, worked out by hand; the runs themselves are no test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.numpy import save_file

from benchmarks.countdown_env import drawn_waits
from benchmarks.countdown_task import CAP, drawn_lengths, model_config, write_rows, write_tokenizer
from benchmarks.long_tail import (
    COLOCATE,
    OF_COLOCATE,
    OF_LIMIT,
    WAYS,
    bus_settings,
    drawn_wishes,
    table,
    verdicts,
    with_ratios,
)
from benchmarks.long_tail_read import (
    FEWEST,
    answer_turns,
    decode_costs,
    decode_totals,
    engine_figures,
    loads_between,
    prefill_costs,
    run_figures,
    tool_waits,
    train_line,
    turn_figures,
    waits_between,
)
from benchmarks.long_tail_run import Work, descendants
from relax_core.config.compose import load_config
from relax_core.contracts.tree import Episode, Turn
from relax_core.rollout.episodes.played_group import GroupStart

WORK = Work(steps=10, prompts=8, group_size=6, cap=1024, lr=1e-4, running=512, skipped=2, micro_batch_tokens=1024)
TURNS = msgspec.structs.replace(WORK, turns=3, cap=680, tool_wait_s=0.5)


def load_of(*times: tuple[int, int, float, float, int]) -> dict[str, Any]:
    """A load of the engine from (samples, decode steps, seconds, seconds of waits for a core, columns)."""
    return {
        "decode_times": [one[:4] for one in times],
        "decode_columns": [(one[0], one[4]) for one in times],
        "busy_s": 1.0,
        "prefill_tokens": 10,
    }


@pytest.mark.parametrize("work", [WORK, TURNS], ids=["one turn", "turns"])
@pytest.mark.parametrize("name", WAYS)
def test_what_is_run_is_a_valid_configuration(
    name: str, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.long_tail_run.model_folder", lambda: tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model_config()))
    save_file({}, tmp_path / "model.safetensors")
    write_tokenizer(tmp_path)
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, [[4] * work.turns], seed=0)
    config, way = load_config([*work.words(rows, seed=3), *WAYS[name].words]), WAYS[name]
    bus = bus_settings(way, work)
    assert (config.mode.max_staleness, config.rollout.spare_prompts) == (bus.max_staleness, bus.spare_groups)
    assert (config.rollout.prompts_per_step, config.algo.group_size) == (bus.groups_per_step, bus.group_size)
    assert (config.run.steps, config.rollout.surplus.value) == (bus.total_steps, bus.surplus)
    assert (config.rollout.partial.value == "abort") is (way.max_aborts > 0)
    assert (config.mode.name.value == "colocate") is way.whole_steps
    reward: Any = config.reward
    assert (reward.cap, config.rollout.max_new_tokens) == (work.cap, work.turns * work.cap)
    if work.turns > 1:
        env: Any = config.env
        assert (env.max_turns, env.max_turn_tokens, env.tool_wait_s) == (3, 680, 0.5)
        assert env.step_timeout_s == 34.0


def test_rates_leave_out_the_first_steps_and_the_last() -> None:
    spoiled = {"step_ms": 1e6, "wait_ms": 1e6, "train_ms": 1e6}
    fine = {"step_ms": 1000.0, "wait_ms": 250.0, "train_ms": 500.0}
    counts = {"samples": 48.0, "tokens": 3000.0, "staleness_mean": 2.0, "reward_counted": 1.0, "staleness_max": 2.0}
    actor = {step: counts | (fine if 2 <= step < 9 else spoiled) | {"reward": 0.1 * step} for step in range(WORK.steps)}
    actor[0]["staleness_max"] = 3.0
    found = run_figures(actor, skipped=WORK.skipped)
    assert (found["samples/s"], found["tokens/s"], found["length"]) == pytest.approx((48.0, 3000.0, 62.5))
    assert (found["waiting"], found["training"], found["most staleness"]) == (0.25, 0.5, 3.0)
    assert (found["reward"], found["first reward"]) == pytest.approx((0.7, 0.0))


def test_a_decode_step_is_split_into_its_samples_and_its_columns() -> None:
    """The engine takes 2 ms, 0.1 ms for a sample and 1 µs for a column; the waits for a core are no part of it."""
    loads, totals = [], dict.fromkeys((1, 4, 32), (0, 0.0, 0.0, 0))
    for number in range(40):
        for size in totals:
            steps, width, wait = 1 + number % 3, 10 * (number % 7 + size), 0.001 * number
            count, seconds, waits, columns = totals[size]
            samples = size if size < 16 else size + 3.5
            took = steps * (0.002 + 0.0001 * samples + 1e-6 * samples * width)
            read = round(steps * samples * width)
            totals[size] = count + steps, seconds + took + wait, waits + wait, columns + read
        loads.append(load_of(*((size, *values) for size, values in totals.items())))
    table_s, column_s = decode_costs(loads)
    assert column_s == pytest.approx(1e-6, rel=0.01)
    assert [size for size, _ in table_s] == [1.0, 4.0, 35.5]
    assert [seconds for _, seconds in table_s] == pytest.approx([0.0021, 0.0024, 0.00555], rel=0.01)


def test_rare_numbers_of_samples_share_an_entry() -> None:
    load = load_of((1, FEWEST - 1, 0.03, 0.0, 10), (2, FEWEST, 0.06, 0.0, 10), (3, 2, 0.1, 0.0, 10))
    table_s, _ = decode_costs([load])
    assert len(table_s) == 2 and 1.0 < table_s[0][0] < 2.0 and table_s[1][0] == 3.0


def test_the_load_of_the_measured_steps_is_a_difference() -> None:
    before, after = load_of((1, 5, 0.5, 0.25, 10)), load_of((1, 8, 1.0, 0.25, 10), (2, 1, 0.25, 0.0, 10))
    assert decode_totals(before, after) == (4.0, 5.0, 0.75, 0.0)
    found = engine_figures(before, after | {"prefill_tokens": 70, "busy_s": 2.0}, took_s=2.0, samples=12)
    assert (found["engine busy"], found["decoded together"], found["prefilled"]) == (0.5, 1.25, 5.0)
    loads = [(1.0, before), (2.0, before), (3.0, after), (4.0, load_of())]
    assert loads_between(loads, 2.5, 3.5, where="run") == [(2.0, before), (3.0, after)]


@pytest.mark.parametrize("loads", [[], [(1.0, load_of())], [(3.0, load_of())], [(1.0, {}), (3.0, {})]])
def test_a_run_without_times_of_its_engine_is_refused(loads: list[tuple[float, dict[str, Any]]]) -> None:
    with pytest.raises(ValueError, match=r"run: loads=\d: .*Give --steps more"):
        loads_between(loads, 2.0, 4.0, where="run")


# -- several turns ----------------------------------------------------------------------------------------------------
def episode(uid: str, *turns: tuple[int, float, float], reward: float | None = 1.0) -> Episode:
    """An episode of turns (tokens, Unix time of the request, Unix time of the response)."""
    made, start = [], 2
    for tokens, began_s, ended_s in turns:
        end = start + tokens
        made.append(
            Turn(start=start, end=end, engine="e", versions=[], finish="stop", began_s=began_s, ended_s=ended_s)
        )
        start = end + 2
    return Episode(uid=uid, leaves=[start], reward=reward, parts={}, turns=made, ended="env_done")


def test_turns_that_were_not_made_have_the_lengths_of_their_prompts() -> None:
    whole, cut = ((4, 0.0, 1.0), (3, 2.0, 3.0)), ((5, 0.0, 1.0),)
    made = {
        "g00000000.0": episode("g00000000.0", *whole),
        "g00000000.1": episode("g00000000.1", *cut),
        "g00000001.0": episode("g00000001.0", *cut, reward=None),
    }
    turns = answer_turns(made, wishes=[[4, 4], [6, 7]], group_size=2)
    assert turns == [[[4, 3], [5]], [[5, 7], [6, 7]]]
    drawn = {uid: [1.0] for uid in ("g00000000.0", "g00000000.1", "g00000001.0", "g00000001.1")}
    assert waits_between(turns, drawn) == [[[1.0], []], [[1.0], [1.0]]]


def test_the_waits_of_the_tools_are_those_that_an_episode_draws() -> None:
    """The seed of an episode's env is that of `GroupStart.seed` in relax_core/rollout/episodes/played_group.py."""
    start = GroupStart(index=5, attempt=0, row={}, where="", rid="", min_version=0)
    drawn = tool_waits(TURNS, 6, seed=3)
    assert len(drawn) == 6 * TURNS.group_size and len({tuple(one) for one in drawn.values()}) == len(drawn)
    assert drawn["g00000005.4"] == drawn_waits(2, mean_s=0.5, seed=start.seed(3, "env/4"))


def test_samples_at_tools_and_the_delay_of_turns_are_counted_in_the_measured_steps() -> None:
    made = {
        "a": episode("a", (4, 0.0, 1.0), (3, 3.0, 4.0)),  # its tool takes 1.5 s of the 2 s
        "b": episode("b", (4, 5.0, 9.0), (3, 11.0, 12.0)),  # 1 s of its tool is measured
    }
    found = turn_figures(made, {"a": [1.5], "b": [1.9]}, began_s=0.5, ended_s=10.0)
    assert found["at tools"] == pytest.approx(3.0 / 9.5)
    assert found["at the engine"] == pytest.approx((0.5 + 1.0 + 4.0) / 9.5)
    assert found["turn late, ms"] == pytest.approx(1e3 * (0.5 + 0.1) / 2)


def test_the_time_beside_decode_steps_is_split_into_tokens_and_turns() -> None:
    """A prefilled token takes 0.2 ms and a turn 3 ms; without turns all of the time is by token."""
    loads, entries = [], []
    tokens = busy_s = 0.0
    for number in range(30):
        loads.append((float(number), load_of((1, number, 0.25 * number, 0.0, 1)) | {"busy_s": busy_s + 0.25 * number}))
        loads[-1][1]["prefill_tokens"] = tokens
        turns, more = 1 + number % 4, 50 * (number % 3)
        tokens, busy_s = tokens + more, busy_s + 0.0002 * more + 0.003 * turns
        entries += [number + 0.5] * turns
    by_token, by_turn = prefill_costs(loads, entries)
    assert (by_token, by_turn) == pytest.approx((0.0002, 0.003), rel=0.01)
    whole_s = loads[-1][1]["busy_s"] - 0.25 * 29
    assert prefill_costs(loads, []) == pytest.approx((whole_s / loads[-1][1]["prefill_tokens"], 0.0))


def test_wishes_are_the_lengths_of_turns_and_one_turn_has_those_of_before() -> None:
    assert drawn_wishes(WORK, 9, mean=64.0, longest=CAP, seed=4) == [
        [length] for length in drawn_lengths(9, mean=64.0, cap=CAP, seed=4)
    ]
    wishes = drawn_wishes(TURNS, 500, mean=64.0, longest=680, seed=4)
    assert len(wishes) == 500 and {len(one) for one in wishes} == {3} and max(map(max, wishes)) <= 680


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cap": 681}, "--cap 681: the model has no positions for 3 such turns. Give 680 or less."),
        ({"cap": 70}, "--cap=70: a prompt wishes for"),
        ({"tool_wait_s": -1.0}, "env.tool_wait_s=-1: give"),
    ],
)
def test_turns_without_room_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        drawn_wishes(msgspec.structs.replace(TURNS, **changes), 500, mean=64.0, longest=680, seed=0)


def test_the_time_of_a_train_step_is_a_line_over_its_tokens() -> None:
    tokens, wait = (1000.0, 2000.0, 4000.0), 7.0
    actor = [{"tokens": count, "train_ms": 20.0 + 0.5 * count + wait} for count in tokens]
    ranks = [{"actor-0/core_wait_ms": wait}] * 3
    assert train_line(actor, ranks) == pytest.approx((0.02, 0.0005))
    falling = [{"tokens": count, "train_ms": 0.5 * count - 20.0 + wait} for count in tokens]
    assert train_line(falling, ranks) == pytest.approx((0.0, (3500.0 - 60.0) / 7000.0 / 1e3))


def test_ratios_are_taken_within_a_repeat() -> None:
    figures = {"limit": 60.0, OF_LIMIT: 0.9}
    found = {
        COLOCATE: [figures | {"samples/s": 20.0}, figures | {"samples/s": 10.0}],
        "async s=2": [figures | {"samples/s": 44.0}, figures | {"samples/s": 22.0}],
    }
    medians = with_ratios(found)
    assert medians["async s=2"][OF_COLOCATE] == pytest.approx(2.2)
    lines = table(medians).splitlines()
    assert lines[0] == "| | colocate | async s=2 |" and "| of colocate | 1.00 | 2.20 |" in lines
    assert [line.split(": ")[-1] for line in verdicts(medians)] == ["not reached", "reached"]


def test_the_processes_of_this_one_are_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in descendants(os.getpid()) and os.getpid() not in descendants(os.getpid())
