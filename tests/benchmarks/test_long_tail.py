"""Tests of the figures of `benchmarks.long_tail`, worked out by hand; the runs themselves are no test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from benchmarks.countdown_task import model_config, write_rows, write_tokenizer
from benchmarks.long_tail import COLOCATE, OF_COLOCATE, OF_LIMIT, WAYS, bus_settings, table, verdicts, with_ratios
from benchmarks.long_tail_run import (
    FEWEST,
    Work,
    decode_costs,
    decode_totals,
    descendants,
    loads_between,
    run_figures,
    train_line,
)
from relax_core.config.compose import load_config

WORK = Work(steps=10, prompts=8, group_size=6, cap=1024, lr=1e-4, running=512, skipped=2, micro_batch_tokens=1024)


def load_of(*times: tuple[int, int, float, float, int]) -> dict[str, Any]:
    """A load of the engine from (samples, decode steps, seconds, seconds of waits for a core, columns)."""
    return {
        "decode_times": [one[:4] for one in times],
        "decode_columns": [(one[0], one[4]) for one in times],
        "busy_s": 1.0,
        "prefill_tokens": 10,
    }


@pytest.mark.parametrize("name", WAYS)
def test_what_is_run_is_a_valid_configuration(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.long_tail_run.model_folder", lambda: tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model_config()))
    save_file({}, tmp_path / "model.safetensors")
    write_tokenizer(tmp_path)
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, [4], seed=0)
    config, way = load_config([*WORK.words(rows, seed=3), *WAYS[name].words]), WAYS[name]
    bus = bus_settings(way, WORK)
    assert (config.mode.max_staleness, config.rollout.spare_prompts) == (bus.max_staleness, bus.spare_groups)
    assert (config.rollout.prompts_per_step, config.algo.group_size) == (bus.groups_per_step, bus.group_size)
    assert (config.run.steps, config.rollout.surplus.value) == (bus.total_steps, bus.surplus)
    assert (config.rollout.partial.value == "abort") is (way.max_aborts > 0)
    assert (config.mode.name.value == "colocate") is way.whole_steps


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
    assert decode_totals(before, after) == (4.0, 0.75, 0.0)
    loads = [(1.0, before), (2.0, before), (3.0, after), (4.0, load_of())]
    assert loads_between(loads, 2.5, 3.5, where="run") == (before, after)


@pytest.mark.parametrize("loads", [[], [(1.0, load_of())], [(3.0, load_of())], [(1.0, {}), (3.0, {})]])
def test_a_run_without_times_of_its_engine_is_refused(loads: list[tuple[float, dict[str, Any]]]) -> None:
    with pytest.raises(ValueError, match=r"run: loads=\d: .*Give --steps more"):
        loads_between(loads, 2.0, 4.0, where="run")


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
