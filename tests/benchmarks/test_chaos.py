"""The fault injection of `benchmarks.chaos`; tests/integration/test_chaos.py has the runs."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.chaos import WITHOUT_END, Harm, schedule, table
from benchmarks.chaos_runs import ENV_WORKER, RUNS, TEXT
from relax_core.config.compose import load_config
from relax_core.registry import find_env

KINDS = RUNS[TEXT].kinds


def harm(kind: str, seconds: float | None, *, end: str = "survived", lost: int = 0) -> Harm:
    settled_s = None if seconds is None else seconds + 1.0
    return Harm(kind=kind, victim=kind, at_step=3, seconds=seconds, settled_s=settled_s, end=end, lost=lost)


def test_every_kind_comes_as_often_as_the_others() -> None:
    planned = schedule(KINDS, kills=50, seed=0)
    counts = Counter(planned)
    assert len(planned) == 50 and counts.keys() == set(KINDS)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert planned == schedule(KINDS, kills=50, seed=0) != schedule(KINDS, kills=50, seed=1)


def test_the_table_counts_by_kind() -> None:
    harms = [harm("bus", 10.0), harm("engine", 2.0), harm("bus", 30.0), harm("bus", None, end="hung", lost=5)]
    assert table(harms).splitlines()[2:] == [
        "| bus | 3 | 2 | 1 | 0 | 0 | 5 | 0 | 20.0 | 30.0 | 21.0 | 31.0 |",
        "| engine | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 2.0 | 2.0 | 3.0 | 3.0 |",
        "| all | 4 | 3 | 1 | 0 | 0 | 5 | 0 | 10.0 | 30.0 | 11.0 | 31.0 |",
    ]


def test_a_kind_that_never_recovered_has_no_times() -> None:
    assert table([harm("bus", None, end="ended")]).splitlines()[2] == "| bus | 1 | 0 | 0 | 1 | 0 | 0 | 0 |  |  |  |  |"


@pytest.mark.parametrize("overrides", [run.overrides for run in RUNS.values()])
@pytest.mark.parametrize("steps", [WITHOUT_END, "run.steps=100"])
def test_the_overrides_are_valid(overrides: tuple[str, ...], steps: str) -> None:
    config = load_config([*overrides, steps])
    assert config.parallel.dp == 2 and config.algo.old_logprobs == "actor_fwd" and config.run.max_restarts == 100


def test_each_run_has_the_processes_that_its_settings_ask_for() -> None:
    assert ENV_WORKER in RUNS["number_guess"].kinds and ENV_WORKER not in RUNS["see"].kinds
    for run in RUNS.values():
        config = load_config([*run.overrides])
        assert (ENV_WORKER in run.own) == find_env(config.env.name).isolated
