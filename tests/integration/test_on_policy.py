"""Tests that strictly on-policy runs are equal to the bit: time-shared, async, or stopped and resumed."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from relax_core.observe.event_log import read_metrics
from relax_core.observe.sample_index import SampleIndex, every_id
from relax_core.observe.summary import STEP_PARTS
from relax_core.server.sample_views import SampleViews
from tests.integration.conftest import STRICT
from tests.integration.live_run import DEADLINE_S, ROOT, FinishedRun, LiveRun, run_to_end
from tests.integration.training_gate import TrainingGate

FROM_TOKENS = ("reward", "exact", "reward_position", "reward_length", "response_tokens", "truncated", "tokens")
FROM_WEIGHTS = ("loss", "grad_norm", "logprob_gap_max", "algorithm/ratio")


def assert_same_run(run: FinishedRun, reference: FinishedRun) -> None:
    """Checks that tokens, losses and weights are equal to the bit."""
    assert len(run.steps()) == len(reference.steps()) == run.summary["steps"]
    for step, (values, expected) in enumerate(zip(run.steps(), reference.steps(), strict=True)):
        assert values.keys() >= {*FROM_WEIGHTS, "reward", "tokens"}  # the other metrics belong to one kind of reward
        for name in (*FROM_TOKENS, *FROM_WEIGHTS):
            assert values.get(name) == expected.get(name), f"{name} differs at step {step}"
    assert run.summary["eval"][-1] == reference.summary["eval"][-1]
    weights, expected_weights = run.weights(), reference.weights()
    assert weights.keys() == expected_weights.keys()
    assert all(tensor.equal(expected_weights[name]) for name, tensor in weights.items())


def test_every_sample_is_kept_with_what_the_trainer_made_of_it(strict: FinishedRun) -> None:
    """The sample log has the ledger's samples. The trainer's log-probs of their tokens equal the engine's log-probs."""
    assert_samples_kept(strict.folder)


def assert_samples_kept(folder: Path) -> None:
    index = SampleIndex(folder, None)
    while index.refresh():
        pass
    count = index.find({})[0]
    kept = {row["uid"]: row for row in every_id(index, {}, most=count)}
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as database:
        ends = database.execute("SELECT uid, step, version FROM events WHERE event = 'trained'").fetchall()
        put = {uid for (uid,) in database.execute("SELECT uid FROM events WHERE event = 'put'")}
    assert put <= kept.keys()
    assert {(uid, step) for uid, step, _ in ends} == {
        (uid, row["step"]) for uid, row in kept.items() if row["state"] == "trained"
    }
    assert all(kept[uid]["version"] == version for uid, _, version in ends)
    views = SampleViews(folder, index)
    fresh = index.find({"staleness_max": 0, "state": "trained"}, order="oldest", most=32)[1]
    assert fresh
    for row in fresh:
        sample = views.sample(row["id"])
        assert sample is not None
        tokens = [token for token in sample["tokens"] if "logprob" in token]
        assert len(tokens) == row["length"]
        assert max(abs(token["gap"]) for token in tokens) < 1e-4
    group = [views.sample(row["id"]) for row in index.find({"group": fresh[0]["group_uid"]}, order="oldest")[1]]
    rewards = np.array([kept_sample["reward"] for kept_sample in group if kept_sample is not None])
    advantages = np.array([kept_sample["tokens"][-1]["advantage"] for kept_sample in group if kept_sample is not None])
    assert np.corrcoef(rewards, advantages)[0, 1] > 0.999  # GRPO shifts and scales the group's rewards


def test_a_strict_run_trains_every_sample_at_staleness_0(strict: FinishedRun) -> None:
    assert strict.code == 0, strict.output
    assert strict.summary["outcome"] == "finished" and strict.summary["steps"] == 60
    assert strict.summary["staleness"] == {"max": 0, "histogram": {"0": 60 * 8 * 16}}
    assert strict.summary["ledger"]["trained"] == 60 * 8 * 16
    strict.assert_all_samples_accounted()
    assert [evaluation["step"] for evaluation in strict.summary["eval"]] == [0, 25, 50, 60]


def test_the_parts_of_each_step_are_the_step(strict: FinishedRun) -> None:
    """No time is counted twice: the parts on the trainer's path take at most the step's time. No part is negative."""
    assert len(strict.steps()) == 60, strict.output
    for step, values in enumerate(strict.steps()):
        parts = [values[f"{part}_ms"] for part in STEP_PARTS]
        assert min(parts) >= 0.0 and sum(parts) <= values["step_ms"], f"step {step}: {values}"
        assert values["bus_ms"] > 0.0 and values["decode_ms"] > 0.0, f"step {step}: {values}"
    split = dict(strict.summary["step_ms"])
    total, beside = split.pop("total"), split.pop("rollout")
    assert sum(split.values()) == pytest.approx(total)
    assert min(split.values()) >= 0.0 and beside > 0.0


@pytest.mark.integration
def test_colocate_over_transfer_queue_is_the_same_run_to_the_bit(strict: FinishedRun, tmp_path: Path) -> None:
    """The mode and the bus do not change any bit."""
    colocate = run_to_end(tmp_path / "run", *STRICT, "mode=colocate", "bus=transfer_queue")
    assert colocate.code == 0, colocate.output
    colocate.assert_all_samples_accounted()
    assert_same_run(colocate, strict)


@pytest.mark.integration
def test_ctrl_c_then_resume_is_the_same_run_to_the_bit(strict: FinishedRun, tmp_path: Path) -> None:
    held = TrainingGate(tmp_path, updates=10)
    strict_held = (*STRICT, *held.overrides)
    with LiveRun(tmp_path / "run", *strict_held) as live:
        live.wait_step(2)
        live.assert_no_media_library()
        live.interrupt()
        live.wait_stop_received()
        held.let_go()
        stopped = live.finish()
    assert stopped.code == 130, stopped.output
    assert stopped.summary["outcome"] == "stopped"
    at = stopped.summary["steps"]
    assert 3 <= at < 60 and stopped.checkpoints() == [at]

    resumed = run_to_end(tmp_path / "run", *strict_held, "resume=auto")
    assert resumed.code == 0, resumed.output
    resumed.assert_all_samples_accounted()
    assert resumed.summary["ledger"]["trained"] == 60 * 8 * 16
    assert_same_run(resumed, strict)


def test_the_loop_in_one_process_is_the_same_run_to_the_bit(strict: FinishedRun) -> None:
    """The first steps have the same learning rates, because both warm up over ten steps."""
    assert_same_as_the_loop(strict)


@pytest.mark.parametrize("states", ["device", "host"])
def test_a_trainer_with_its_state_on_the_host_between_turns_is_the_same_run_to_the_bit(
    states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU branch on CPU tensors moves the state to the host after each step, also before a checkpoint.

    With optimizer.states=host the optimizer's states are only in an update on the device.
    """
    monkeypatch.setenv("RELAX_TRAIN_DEVICE", "gpu_branch_on_cpu")
    settings = ("mode=colocate", "run.steps=10", "run.save_every=4", "eval.every=0", f"optimizer.states={states}")
    moved = run_to_end(tmp_path / "run", *settings)
    assert moved.code == 0, moved.output
    moved.assert_all_samples_accounted()
    assert moved.checkpoints() == [4, 8, 10]
    assert_same_as_the_loop(moved)


def test_log_probs_of_the_actors_ranks_and_of_separate_processes_give_the_same_run_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor's ranks exchange weights with the reference's in each turn, and have no state on the device between."""
    monkeypatch.setenv("RELAX_TRAIN_DEVICE", "gpu_branch_on_cpu")
    keys = ("mode=colocate", "algo.kl_coef=0.05", "algo.old_logprobs=actor_fwd", "run.steps=4", "eval.every=0")
    actor, separate = (
        run_to_end(tmp_path / place, *keys, f"placement.forward={place}") for place in ("actor", "separate")
    )
    for run, has_roles in ((actor, False), (separate, True)):
        assert run.code == 0, run.output
        run.assert_all_samples_accounted()
        sources = {metric.source for metric in read_metrics(run.folder)}
        assert (sources >= {"actor_fwd", "reference"}) is has_roles
    for values, expected in zip(actor.steps(), separate.steps(), strict=True):
        assert values["logprobs_ms"] > expected["logprobs_ms"] == 0.0
        names = [name for name in expected if name.startswith("algorithm/") or name in (*FROM_TOKENS, *FROM_WEIGHTS)]
        assert {name: values[name] for name in names} == {name: expected[name] for name in names}
        assert {"algorithm/old_kl", "algorithm/reference_kl"} <= set(names)
    assert actor.steps()[-1]["algorithm/reference_kl"] > 0.0
    expected_weights = separate.weights()
    assert all(tensor.equal(expected_weights[name]) for name, tensor in actor.weights().items())


def metrics_of_the_loop() -> list[list[float]]:
    """Runs ten steps of examples/one_loop.py. Returns their rewards, shares of exact answers, gaps and ratios."""
    loop = f"runpy.run_path({str(ROOT / 'examples/one_loop.py')!r}, run_name='read')['train']('run.steps=10')"
    message = "[(step.reward, step.exact, step.logprob_gap, step.ratio) for step in steps]"
    ran = subprocess.run(
        [sys.executable, "-c", f"import json, runpy; steps = {loop}; print(json.dumps({message}))"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ran.returncode == 0, ran.stderr
    metrics: list[list[float]] = json.loads(ran.stdout.splitlines()[-1])
    assert len(metrics) == 10
    return metrics


def assert_same_as_the_loop(run: FinishedRun) -> None:
    """Compares the first ten steps with those of examples/one_loop.py, which moves nothing."""
    for step, (reward, exact, gap, ratio) in enumerate(metrics_of_the_loop()):
        values = run.steps()[step]
        in_float32 = pytest.approx((reward, exact), rel=1e-6)
        assert (values["reward"], values["exact"]) == in_float32, f"step {step}"
        assert (values["logprob_gap_max"], values["algorithm/ratio"]) == (gap, ratio), f"step {step}"
