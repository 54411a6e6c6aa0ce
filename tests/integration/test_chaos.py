"""Every kind of process of one run is killed in turn, and one is frozen; `benchmarks.chaos` repeats this."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.chaos import Harm, harm_run
from benchmarks.chaos_runs import RUNS

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

HARMS = (
    "engine",
    "actor_rank_1",
    "gcs",
    "rollout",
    "engine_and_owner",
    "bus",
    "frozen",
    "raylet",
    "controller",
)
# test_kills.py, test_recovery.py and test_elastic_kills.py cover the others.
OF_NO_OTHER_TEST = ("gcs", "engine_and_owner", "raylet")
TURNS = ("env_worker", "engine", "rollout", "actor_rank_0")
AGENTS = ("agent", "rollout", "agent_guard")


@pytest.mark.parametrize("kinds", [OF_NO_OTHER_TEST, pytest.param(HARMS, marks=pytest.mark.soak)], ids=["some", "all"])
def test_a_run_outlives_its_processes(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    harms = list(harm_run(tmp_path / "run", kinds, seed=4))
    assert_nothing_is_lost(harms, kinds)


def test_a_run_of_several_turns_outlives_its_env_workers_and_others(tmp_path: Path) -> None:
    harms = list(harm_run(tmp_path / "run", TURNS, seed=2, run=RUNS["number_guess"]))
    assert_nothing_is_lost(harms, TURNS)


def test_a_run_that_agents_play_outlives_them_and_their_rollout(tmp_path: Path) -> None:
    """No agent and no guard remains, neither of the killed rollout worker nor at the end."""
    harms = list(harm_run(tmp_path / "run", AGENTS, seed=3, run=RUNS["agents"]))
    assert_nothing_is_lost(harms, AGENTS)


def assert_nothing_is_lost(harms: Sequence[Harm], kinds: Sequence[str]) -> None:
    """Checks that the run survives each harm and ends normally."""
    assert [harm.kind for harm in harms] == list(kinds), "an extra harm means that the run did not end normally"
    for harm in harms:
        assert harm.end == "survived", harm
        assert harm.lost == harm.trained_twice == 0, harm
