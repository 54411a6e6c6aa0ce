"""Tests whole runs of PPO with its critic: async and time-shared, stopped and resumed, and with a lost critic."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live_run import FinishedRun, LiveRun, run_to_end
from tests.integration.training_gate import TrainingGate

pytestmark = pytest.mark.integration

PPO = ("algo=ppo", "eval.every=0", "run.export_hf=true")
UPDATES, UPDATES_A_STEP = ("algo.mini_batches=2", "algo.epochs=2"), 4
STRICT = (*PPO, *UPDATES, "mode.max_staleness=0", "run.steps=24", "run.save_every=8")
OF_THE_RUN = ("reward", "tokens", "updates", "loss", "grad_norm", "algorithm/ratio")
OF_THE_CRITIC = ("value/loss", "value/grad_norm", "value/return", "value/explained_variance")


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    run = run_to_end(tmp_path_factory.mktemp("strict") / "run", *STRICT)
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    return run


def assert_same_run(run: FinishedRun, reference: FinishedRun) -> None:
    """Checks that rewards, losses of policy and critic, and weights are equal to the bit."""
    assert len(run.steps()) == len(reference.steps()) == 24
    for step, (values, expected) in enumerate(zip(run.steps(), reference.steps(), strict=True)):
        for name in (*OF_THE_RUN, *OF_THE_CRITIC):
            assert values[name] == expected[name], f"{name} differs at step {step}"
    expected_weights = reference.weights()
    assert all(tensor.equal(expected_weights[name]) for name, tensor in run.weights().items())


def test_a_strict_step_makes_its_updates_on_policy(strict: FinishedRun) -> None:
    assert strict.summary["staleness"]["max"] == 0
    for values in strict.steps():
        assert values["updates"] == UPDATES_A_STEP
        assert values["logprob_gap_max"] <= 2e-5  # covers the first update, which has the engine's weights
        assert values["algorithm/advantage"] == pytest.approx(0.0, abs=1e-4)  # whitened over the step
    first, last = strict.steps()[0], strict.steps()[-1]
    assert first["value/explained_variance"] < 0.2
    assert last["value/loss"] < 0.3 * first["value/loss"]


def test_a_resumed_critic_goes_on_to_the_bit_taking_turns(strict: FinishedRun, tmp_path: Path) -> None:
    """The first part is async, the second part time-shared. Together they equal the run without a stop."""
    held = TrainingGate(tmp_path, updates=5 * UPDATES_A_STEP, algorithm="ppo")
    strict_held = (*STRICT, *held.overrides)
    with LiveRun(tmp_path / "run", *strict_held) as live:
        live.wait_step(2)
        live.interrupt()
        live.wait_stop_received()
        held.let_go()
        stopped = live.finish()
    assert stopped.code == 130, stopped.output
    at = stopped.summary["steps"]
    assert 3 <= at < 24 and stopped.checkpoints()[-1] == at
    assert (stopped.folder / "checkpoints" / f"step_{at:08d}" / "critic" / "provenance.json").is_file()
    resumed = run_to_end(tmp_path / "run", *strict_held, "mode=colocate", "resume=auto")
    assert resumed.code == 0, resumed.output
    resumed.assert_all_samples_accounted()
    assert_same_run(resumed, strict)


@pytest.mark.chaos
def test_a_lost_critic_is_a_lost_rank(strict: FinishedRun, tmp_path: Path) -> None:
    """The critic's weights are trainer state: all services go back to the newest checkpoint. The run is equal."""
    held = TrainingGate(tmp_path, updates=12 * UPDATES_A_STEP, algorithm="ppo")
    with LiveRun(tmp_path / "run", *STRICT, *held.overrides) as live:
        live.wait_checkpoint(8)
        live.kill("ray::CriticTrainer")
        held.let_go()
        run = live.finish()
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    (recovery,) = run.summary["recoveries"]
    assert (recovery["tier"], recovery["from_step"]) == (2, 8)
    assert_same_run(run, strict)
