"""A fixed selection of the injuries of `benchmarks.chaos`, on every kind of run: nothing is lost and no run ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos import SURVIVED, Draw, injured_run, possible_runs

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

SELECTION = {  # run → injuries in this order; test_kills.py, test_recovery.py and test_elastic_kills.py have others
    "text": (
        *("kill gcs", "engine and owner", "kill raylet", "stop fork_server", "kill gateway at birth"),
        *("stop engine at birth", "stop a_role", "after the last train step", "SIGINT to all"),
    ),
}
