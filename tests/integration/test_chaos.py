"""Every kind of process of one run dies, one after the other; one only freezes. `benchmarks.chaos` does it 50 times.

A run whose episodes play in env workers outlives the processes that hold an episode.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos import harm_run

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

HARMS = (
    "engine",
    "actor_rank_1",
    "gcs",
    "rollout",
    "engine_and_owner",
    "serve_controller",
    "bus",
    "frozen",
    "raylet",
    "controller",
)


def test_a_run_outlives_its_processes(tmp_path: Path) -> None:
    harms = list(harm_run(tmp_path / "run", HARMS, seed=4))
    assert [harm.kind for harm in harms] == list(HARMS), "there is one more where the run did not end well"
    for harm in harms:
        assert harm.end == "survived", harm
        assert harm.lost == harm.trained_twice == 0, harm


def test_a_run_of_episodes_outlives_its_processes(tmp_path: Path) -> None:
    kinds = ("env_worker", "engine", "rollout", "actor_rank_0")
    harms = list(harm_run(tmp_path / "run", kinds, seed=2, run="episodes"))
    assert [(harm.kind, harm.end) for harm in harms] == [(kind, "survived") for kind in kinds], harms
    assert not any(harm.lost or harm.trained_twice for harm in harms), harms
