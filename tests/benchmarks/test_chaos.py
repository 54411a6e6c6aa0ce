"""Tests the fault injection of `benchmarks.chaos`. tests/integration/test_chaos.py executes runs."""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.chaos import Draw, draw_runs, read_record, results, tables, went_wrong
from benchmarks.chaos_injuries import FULL_DISK, injuries
from benchmarks.chaos_runs import ENV_WORKER, REWARD_WORKER, RUNS, TEXT, WITHOUT_END, LedgerCounts, count_samples
from relax_core.config.compose import load_config
from relax_core.config.reward_choice import may_be_isolated
from relax_core.registry import find_env

CLOSED = LedgerCounts(issued=8, lost=0, trained_twice=0, without_reason=0)
LOST = LedgerCounts(issued=8, lost=1, trained_twice=0, without_reason=0, wrong=("a",))


def draw(injury: str, first_s: float | None, *, end: str = "survived", run: str = TEXT, tier: int = 0) -> Draw:
    third_s = None if first_s is None else first_s + 1.0
    return Draw(injury=injury, run=run, text=injury, at_step=3, end=end, tier=tier, first_s=first_s, third_s=third_s)


def test_each_inflicts_every_injury_of_every_run_once() -> None:
    possible = {name: list(injuries(run)) for name, run in RUNS.items()}
    chosen = list(draw_runs(possible, draws=0, each=True, chance=random.Random(0)))
    assert Counter((name, kind) for name, kinds in chosen for kind in kinds) == Counter(
        (name, kind) for name, kinds in possible.items() for kind in kinds
    )


def test_a_seed_repeats_its_draws() -> None:
    possible = {name: list(injuries(run)) for name, run in RUNS.items()}
    first, again, other_draws = (
        list(draw_runs(possible, draws=25, each=False, chance=random.Random(seed))) for seed in (1, 1, 2)
    )
    assert first == again != other_draws and [len(kinds) for _, kinds in first] == [10, 10, 5]


def test_injuries_that_the_machine_does_not_allow_are_left_out() -> None:
    assert FULL_DISK in injuries(RUNS[TEXT]) and FULL_DISK not in injuries(RUNS[TEXT], without={FULL_DISK})


def test_the_tables_count_by_injury_run_and_tier() -> None:
    found = [draw("kill bus", 10.0, tier=2), draw("pair", 2.0, run="see"), draw("kill bus", None, end="hung"), CLOSED]
    lines = tables(found).splitlines()
    assert "| kill bus | 2 | 1 | 1 | 0 | 0 | 0 | 10.0 | 10.0 | 11.0 | 11.0 |  |" in lines
    assert "| see | 1 | 1 | 0 | 0 | 0 | 0 | 2.0 | 2.0 | 3.0 | 3.0 |  |" in lines
    assert "| 2 | 1 | 1 | 0 | 0 | 0 | 0 | 10.0 | 10.0 | 11.0 | 11.0 |  |" in lines
    assert lines[-1].startswith("8 samples in 1 ledgers: 0 lost")


def test_a_record_is_read_again_and_gives_the_results_of_the_site(tmp_path: Path) -> None:
    found = [draw("pair", 2.0), LOST]
    record = tmp_path / "draws.jsonl"
    record.write_text("".join(json.dumps(asdict(outcome)) + "\n" for outcome in found))
    assert read_record(record) == found
    page = results(found, command="c")
    assert page["summary"].startswith("1 of 1") and "1 lost" in page["summary"]
    assert all(len(row) == len(page["columns"]) for row in page["rows"])


@pytest.mark.parametrize(
    ("found", "wrong"),
    [([draw("pair", 1.0), CLOSED], False), ([draw("pair", None, end="ended")], True), ([LOST], True)],
)
def test_a_lost_run_or_sample_is_wrong(found: list[Draw | LedgerCounts], wrong: bool) -> None:
    assert went_wrong(found) is wrong


def test_the_ledger_is_counted_by_sql(tmp_path: Path) -> None:
    """a: trained once; b: trained twice; c: dropped without a reason; d: lost."""
    rows = [("issued", uid, None) for uid in "abcd"]
    rows += [("trained", uid, None) for uid in "abb"] + [("dropped", "c", "")]
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as database, database:
        database.execute("CREATE TABLE events (event TEXT, uid TEXT, reason TEXT)")
        database.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
    counts = count_samples(tmp_path)
    assert counts == LedgerCounts(issued=4, lost=1, trained_twice=1, without_reason=1, wrong=("d", "b", "c"))
    assert not counts.closed


@pytest.mark.parametrize("overrides", [run.overrides for run in RUNS.values()])
@pytest.mark.parametrize("steps", [WITHOUT_END, "run.steps=100"])
def test_the_overrides_are_valid(overrides: tuple[str, ...], steps: str) -> None:
    config = load_config([*overrides, steps])
    assert config.parallel.dp == 2 and config.algo.old_logprobs == "actor_fwd" and config.run.max_restarts == 100


def test_each_run_has_the_processes_that_its_settings_require() -> None:
    for run in RUNS.values():
        config = load_config([*run.overrides])
        assert (ENV_WORKER in run.own) == find_env(config.env.name).isolated
        assert (REWARD_WORKER in run.own) == may_be_isolated(config.reward)
