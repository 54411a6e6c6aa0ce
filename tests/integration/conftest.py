"""Makes finished runs once per session. Several tests check these runs."""

from __future__ import annotations

import pytest

from tests.integration.live_run import FinishedRun, run_to_end

STRICT = ("mode=async", "mode.max_staleness=0", "run.steps=60", "eval.every=25", "eval.rows=64", "run.save_every=0")


@pytest.fixture(scope="session")
def strict(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Returns an uninterrupted run with mode=async and max_staleness=0."""
    return run_to_end(tmp_path_factory.mktemp("strict") / "run", *STRICT)
