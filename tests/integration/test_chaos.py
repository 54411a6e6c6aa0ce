"""A fixed selection of 60 injuries of `benchmarks.chaos` on seven kinds of run: no run ends and no sample is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos import SURVIVED, Draw, injured_run, possible_runs

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

SELECTION = {  # run → injuries in this order
    "text": (
        *("kill gcs", "engine and owner", "kill raylet", "stop fork_server", "kill gateway at birth"),
        *("stop engine at birth", "after the last train step", "SIGINT to all", "kill a forked worker at birth"),
    ),
    "number_guess": (
        *("kill env_worker", "stop env_worker at birth", "kill engine", "stop rollout", "kill actor_rank_0"),
        *("no descriptor", "ledger locked", "kill advantages at birth"),
    ),
    "agents": ("kill agent", "stop agent", "kill rollout", "kill agent_guard", "pair", "in a checkpoint"),
}
