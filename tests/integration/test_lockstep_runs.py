"""Tests that lockstep runs with an env of several turns are equal to the bit: async, time-shared, resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.bus.ledger_reader import LedgerFile
from tests.integration.live_run import FinishedRun, LiveRun, run_to_end
from tests.integration.test_on_policy import assert_same_run
from tests.integration.training_gate import TrainingGate

pytestmark = pytest.mark.integration

STOPPED_AFTER, PROMPTS, GROUP_SIZE = 4, 4, 4
LOCKSTEP = (
    *("env=number_guess", "engine.context_length=192", "rollout.lockstep=true", "mode.max_staleness=0"),
    *(f"algo.group_size={GROUP_SIZE}", f"rollout.prompts_per_step={PROMPTS}"),
    *("run.save_every=0", "eval.every=5", "eval.rows=8"),
)


def assert_same_games(played: FinishedRun, reference: FinishedRun) -> None:
    """Checks that weights and step metrics are equal to the bit, and that the turns are equal."""
    assert_same_run(played, reference)
    steps = len(played.steps())
    episodes = episodes_of(played)
    assert episodes == episodes_of(reference) and len(episodes) == steps * PROMPTS * GROUP_SIZE
    for run in (played, reference):
        run.assert_all_samples_accounted()
        assert run.summary["run"]["repeatable"] is True
        assert run.summary["ledger"]["trained"] == steps * PROMPTS * GROUP_SIZE
        assert run.summary["logprob_gap"]["max"] <= 2e-5


def episodes_of(run: FinishedRun) -> dict[str, tuple[object, ...]]:
    """Returns rows, versions, ends and rewards of each episode's turns, but no times.

    Episodes that were put but not trained before the stop are played again, with the same result.
    """
    with LedgerFile(run.folder / "ledger.sqlite") as ledger:
        histories = [sample for step in range(len(run.steps())) for sample in ledger.samples({"step": step})]
    found: dict[str, tuple[object, ...]] = {}
    for history in histories:
        for made in (event.made for event in history.events if event.made is not None and not event.undone):
            turns = [(turn.start, turn.end, turn.versions, turn.finish, turn.reward) for turn in made.turns]
            went = (made.leaves, made.reward, made.ended, turns)
            assert found.setdefault(history.uid, went) == went
    return found


@pytest.fixture(scope="module", params=[10, pytest.param(20, marks=pytest.mark.soak)])
def steps(request: pytest.FixtureRequest) -> int:
    wanted: int = request.param
    return wanted


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory, steps: int) -> FinishedRun:
    run = run_to_end(tmp_path_factory.mktemp("side_by_side") / "run", *LOCKSTEP, f"run.steps={steps}")
    assert run.code == 0, run.output
    assert len(run.steps()) == steps
    return run


def test_colocate_is_the_same_run_to_the_bit(side_by_side: FinishedRun, steps: int, tmp_path: Path) -> None:
    colocate = run_to_end(tmp_path / "run", *LOCKSTEP, f"run.steps={steps}", "mode=colocate")
    assert colocate.code == 0, colocate.output
    assert_same_games(colocate, side_by_side)


@pytest.mark.soak
def test_a_run_that_stops_and_goes_on_is_the_same_to_the_bit(
    side_by_side: FinishedRun, steps: int, tmp_path: Path
) -> None:
    """The resumed run begins with an additional evaluation. It changes no result."""
    held = TrainingGate(tmp_path, updates=STOPPED_AFTER + 1)
    overrides = (*LOCKSTEP, f"run.steps={steps}", *held.overrides)
    with LiveRun(tmp_path / "run", *overrides) as live:
        live.wait_step(STOPPED_AFTER - 1)
        live.interrupt()
        live.wait_stop_received()
        held.let_go()
        stopped = live.finish()
    assert stopped.code == 130, stopped.output
    at = stopped.summary["steps"]
    assert STOPPED_AFTER <= at < steps and stopped.checkpoints() == [at]
    resumed = run_to_end(tmp_path / "run", *overrides, "resume=auto")
    assert resumed.code == 0, resumed.output
    assert at in [evaluation["step"] for evaluation in resumed.summary["eval"]]
    assert_same_games(resumed, side_by_side)
