"""Tests fixed selections of the injuries of `benchmarks.chaos`: no run ends and no sample is lost.

CI has 16 injuries on three kinds of run. `make test-soak` has 60 injuries on seven kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.chaos import NOT_MET, SURVIVED, Draw, injured_run, possible_runs

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

IN_CI = {  # kind of run → injuries in this order
    "text": (
        *("kill gcs", "engine and owner", "stop raylet", "stop engine at birth", "kill gateway at birth"),
        "after the last train step",
    ),
    "number_guess": (
        *("kill env_worker", "stop env_worker at birth", "kill engine", "stop rollout", "kill actor_rank_0"),
        "no descriptor",
    ),
    "agents": ("kill agent", "stop agent", "kill rollout", "kill agent_guard"),
}
IN_SOAK = {
    "text": (
        *("kill gcs", "stop raylet", "engine and owner", "stop fork_server", "kill gateway at birth"),
        *("stop engine at birth", "after the last train step", "SIGINT to all", "kill forked_worker at birth"),
        *("everything killed", "kill actor_rank_1 at birth", "stop controller"),
    ),
    "number_guess": (
        *("kill env_worker", "stop env_worker at birth", "kill engine", "stop rollout", "kill actor_rank_0"),
        *("no descriptor", "ledger locked", "kill advantages at birth", "stop gateway", "damaged checkpoint"),
    ),
    "agents": (
        *("kill agent", "stop agent", "kill rollout", "kill agent_guard", "pair", "in a checkpoint"),
        *("stop reference at birth", "kill trackers"),
    ),
    "see": (
        *("kill encode_worker", "stop encode_worker", "kill rollout at birth", "at a publication", "stop actor_fwd"),
        *("kill engine at birth", "kill bus", "SIGTERM to all"),
    ),
    "reward_workers": (
        *(
            "kill reward_worker",
            "stop reward_worker",
            "kill reward_worker at birth",
            "kill rollout",
            "stop bus at birth",
        ),
        *("supervisor and controller killed", "kill engine_owner at birth", "pair"),
    ),
    "non_root": (
        *("kill actor_rank_1", "stop engine_owner", "kill raylet", "stop advantages", "kill gateway", "pair"),
        *("no descriptor", "a process at the start"),
    ),
    "false_clock": ("clock jump", "kill engine", "clock jump", "kill rollout", "clock jump", "stop actor_rank_0"),
}


def check(folder: Path, name: str, injuries: Sequence[str]) -> None:
    """Inflicts the injuries on one run, and checks the run and its ledger."""
    if name not in possible_runs():
        pytest.skip("another user needs root and setpriv, and a false clock needs a C compiler")
    *draws, counts = injured_run(folder / "run", name, injuries, seed=4)
    print(*draws, counts, sep="\n")
    assert [draw for draw in draws if not isinstance(draw, Draw) or draw.end not in (SURVIVED, NOT_MET)] == []
    assert [draw.injury for draw in draws if isinstance(draw, Draw)] == list(injuries)
    # On a busy machine a phase may end before the injury.
    assert sum(isinstance(draw, Draw) and draw.end == NOT_MET for draw in draws) <= 1
    assert not isinstance(counts, Draw) and counts.closed, counts


@pytest.mark.parametrize("name", IN_CI)
def test_a_run_survives_its_injuries(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, IN_CI[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", IN_SOAK)
def test_all_kinds_of_run_survive_60_injuries(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, IN_SOAK[name])
