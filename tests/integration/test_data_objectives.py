"""Tests runs that train on data rows without engines: fine-tuning through kills, pairs and labels."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.data.sources import make_source
from tests.integration.live_run import ENGINE, FinishedRun, LiveRun, run_to_end
from tests.integration.training_gate import TrainingGate

pytestmark = pytest.mark.integration

ROWS, HELD_OUT, OF_STEP, EPOCHS = 48, 8, 4, 3
DATA = ("data=file", f"data.eval_size={HELD_OUT}", f"eval.rows={HELD_OUT}", "model.task=reverse_digits")
SIZES = (f"rollout.prompts_per_step={OF_STEP}", f"run.epochs={EPOCHS}", "eval.every=10", "run.export_hf=false")
FEEDER = "ray::FeederWorker"


def write_rows(path: Path, *, pairs: bool, labels: bool = False) -> str:
    """Writes rows of the reversal task; a rejected response has the digits in the order of the prompt.

    With ``labels`` every third row has such a response and the label false.
    """
    rows = []
    for place in range(ROWS):
        digits = str(10_234 + 1_913 * place)
        answer: dict[str, object] = {"completion": digits[::-1]}
        if pairs:
            answer = {"chosen": digits[::-1], "rejected": digits}
        if labels:
            answer = {"completion": digits if place % 3 == 0 else digits[::-1], "label": place % 3 != 0}
        rows.append(json.dumps({"prompt": f"reverse {digits}", **answer}))
    path.write_text("\n".join(rows) + "\n")
    return f"data.path={path}"


def trained_rows(run: FinishedRun, *overrides: str) -> Counter[int]:
    """Returns how often each data row was trained, from the ledger's file."""
    config = load_config(overrides)
    source = make_source(config.data, seed=config.seed, eval_rows=HELD_OUT, offline="demonstrations")
    groups = {int(uid.removeprefix("g").partition(".")[0]) for uid in run.persisted("trained")}
    return Counter(source.number(index) for index in groups)


@pytest.mark.chaos
def test_every_row_is_trained_once_an_epoch_although_trainer_and_feeder_are_killed(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", pairs=False)
    held = TrainingGate(tmp_path, updates=7, algorithm="sft")
    overrides = (*held.overrides, data, *DATA, *SIZES, "run.save_every=5")
    with LiveRun(tmp_path / "run", *overrides) as live:
        live.wait_checkpoint(5)
        live.kill("ray::PolicyTrainer")
        live.wait_noticed(1)
        held.allow(15)
        live.wait_recovered(1)
        live.kill(FEEDER)
        live.wait_noticed(2)
        assert not [line for line in live.processes().values() if ENGINE in line or "EngineOwner" in line]
        held.let_go()
        run = live.finish()
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    assert run.summary["steps"] == EPOCHS * (ROWS - HELD_OUT) // OF_STEP == run.summary["steps_recorded"]
    counts = trained_rows(run, data, *DATA)
    assert len(counts) == ROWS - HELD_OUT and set(counts.values()) == {EPOCHS}
    losses = [evaluation["figures"]["loss"] for evaluation in run.summary["eval"]]
    assert {evaluation["step"] for evaluation in run.summary["eval"]} >= {0, 10, 20, 30}
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.7 * losses[0]


def test_preferences_are_learnt_and_begin_at_the_reference(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", pairs=True)
    run = run_to_end(tmp_path / "run", "algo=dpo", data, *DATA, *SIZES, "optimizer.lr=3e-4", "run.save_every=0")
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    first, *_, last = (evaluation["figures"] for evaluation in run.summary["eval"])
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5), "-log sigmoid(0), because policy and reference are equal"
    assert last["loss"] < 0.6 and last["preference_accuracy"] == 1.0


def test_labels_are_learnt_and_each_row_has_a_mismatched_pair(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", pairs=False, labels=True)
    options = ("algo=kto", "optimizer.lr=3e-4", "run.save_every=0", "parallel=dp2")
    run = run_to_end(tmp_path / "run", data, *DATA, *SIZES, *options)
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    trained = EPOCHS * (ROWS - HELD_OUT)
    assert run.summary["ledger"]["trained"] == trained
    assert run.summary["ledger"]["dropped"] == {"mismatched": trained}
    first, *_, last = (evaluation["figures"] for evaluation in run.summary["eval"])
    assert (first["loss"], first["kl"]) == (pytest.approx(0.5, abs=1e-5), pytest.approx(0.0, abs=1e-4))
    assert last["loss"] < 0.49 and last["kl"] > 0.1 and last["chosen_reward"] > last["rejected_reward"]
