"""kill -9 of a whole run at any moment: resume=auto goes on, every step is done, every sample ends once."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from relax_core.bus.ledger_file import LedgerFile
from tests.integration.live_run import LiveRun, run_to_end

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

STEPS = 120
SAVE_EVERY = 10
OVERRIDES = ("mode.max_staleness=1", f"run.steps={STEPS}", f"run.save_every={SAVE_EVERY}", "eval.every=0")


def moment(seed: int) -> tuple[int, float]:
    """(train step, seconds after it) at which everything dies; some are before there is a checkpoint."""
    chance = random.Random(seed)
    return chance.randrange(1, STEPS - 5), chance.uniform(0.0, 0.1)


def kill_and_resume(folder: Path, *, seed: int) -> None:
    step, delay_s = moment(seed)
    with LiveRun(folder, *OVERRIDES) as live:
        live.wait_step(step)
        time.sleep(delay_s)  # into the step, the push, or a checkpoint
        live.kill_everything()
        assert "finished" not in live.output()
    kept = max((int(path.parent.name[5:]) for path in folder.glob("checkpoints/step_*/meta.json")), default=0)
    assert step - SAVE_EVERY <= kept + 1, "a checkpoint that was due is not there"

    resumed = run_to_end(folder, *OVERRIDES, "resume=auto")
    assert resumed.code == 0, resumed.output
    assert resumed.summary["steps"] == STEPS
    assert len(resumed.steps()) == STEPS
    assert resumed.summary["staleness"]["max"] <= 1
    resumed.assert_books_closed()
    with LedgerFile(folder / "ledger.sqlite") as file:
        books = file.books(run_over=True)
    assert books.lost == books.trained_twice == [] and books.open == {}
    assert books.issued == resumed.summary["ledger"]["issued"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_that_was_killed_as_a_whole_goes_on(seed: int, tmp_path: Path) -> None:
    kill_and_resume(tmp_path / "run", seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 23))
def test_at_any_moment(seed: int, tmp_path: Path) -> None:
    kill_and_resume(tmp_path / "run", seed=seed)


def test_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    """The run begins again; what the first one booked and reported counts no more."""
    overrides = ("mode.max_staleness=1", "run.steps=60", "run.save_every=0", "eval.every=0")
    with LiveRun(tmp_path / "run", *overrides) as live:
        live.wait_step(2)
        live.kill_everything()
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))
    resumed = run_to_end(tmp_path / "run", *overrides, "resume=auto")
    assert resumed.code == 0, resumed.output
    resumed.assert_books_closed()
    assert resumed.summary["steps"] == len(resumed.steps()) == 60
