"""A fixed selection of 60 injuries of `benchmarks.chaos` on seven kinds of run: no run ends and no sample is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos import NOT_MET, SURVIVED, Draw, injured_run, possible_runs

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

SELECTION = {  # run → its injuries in this order
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


@pytest.mark.parametrize("name", SELECTION)
def test_a_run_survives_its_injuries(tmp_path: Path, name: str) -> None:
    if name not in possible_runs():
        pytest.skip("another user needs root and setpriv, and a false clock needs libfaketime")
    *draws, counts = injured_run(tmp_path / "run", name, SELECTION[name], seed=4)
    print(*draws, counts, sep="\n")
    assert [draw for draw in draws if not isinstance(draw, Draw) or draw.end not in (SURVIVED, NOT_MET)] == []
    assert [draw.injury for draw in draws if isinstance(draw, Draw)] == list(SELECTION[name])
    # On a busy machine a phase may pass before the injury.
    assert sum(isinstance(draw, Draw) and draw.end == NOT_MET for draw in draws) <= 1
    assert not isinstance(counts, Draw) and counts.closed, counts
