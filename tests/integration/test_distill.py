"""Tests whole runs of distillation: defaults, a trained run's folder as a teacher in an engine, and kills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.data.generated import example
from tests.integration.live_run import FinishedRun, LiveRun, run_to_end
from tests.integration.training_gate import TrainingGate

pytestmark = pytest.mark.integration

QUIET = ("algo=distill", "run.save_every=0")
STEPS = 70


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Returns a short run with the defaults: async, the built-in teacher, forward passes of the teacher."""
    run = run_to_end(tmp_path_factory.mktemp("taught") / "run", *QUIET, f"run.steps={STEPS}", f"eval.every={STEPS}")
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    return run


def test_the_student_reaches_its_teachers_level(taught: FinishedRun) -> None:
    """The built-in teacher solves all held-out rows. The untrained student solves one in five."""
    before, after = taught.summary["eval"]
    assert before["exact"] < 0.4 and after["exact"] >= 0.95
    first, last = taught.steps()[0], taught.steps()[-1]
    assert first["algorithm/teacher_kl"] > 2.0 and last["algorithm/teacher_kl"] < 1.0
    assert first["algorithm/advantage"] == pytest.approx(-first["algorithm/teacher_kl"], abs=1e-4)
    assert taught.summary["logprob_gap"]["max"] <= 2e-5
    assert taught.summary["ledger"]["trained"] == STEPS * 8 * 16


def test_two_teachers_by_engines_and_taking_turns(taught: FinishedRun, tmp_path: Path) -> None:
    """One teacher is a trained run's folder. The data names the teacher of each prompt."""
    rows = tmp_path / "rows.jsonl"
    examples = [example("reverse_digits", split="train", seed=3, index=index) for index in range(400)]
    lines = [
        {"prompt": task_example.prompt, "answer": task_example.answer, "by": ("default", "trained")[place % 2]}
        for place, task_example in enumerate(examples)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = (
        f"algo.teachers={{default: tiny_qwen3_teacher, trained: '{taught.folder}/hf'}}",
        "algo.teacher_key=by",
        "algo.served_by=engine",
    )
    data = ("data=file", f"data.path={rows}", "data.eval_size=100", "model.task=reverse_digits", "eval.rows=100")
    fast = ("optimizer.lr=2e-3", "optimizer.warmup_steps=4")
    more = (*fast, "algo.form=topk_mixed", "algo.group_size=8", "mode=colocate", "run.steps=40", "eval.every=40")
    run = run_to_end(tmp_path / "run", *QUIET, *keys, *data, *more)
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    assert run.summary["staleness"]["max"] == 0
    first, last = run.steps()[0], run.steps()[-1]
    assert last["algorithm/teacher_divergence"] < 0.5 * first["algorithm/teacher_divergence"]
    before, after = run.summary["eval"]
    assert after["exact"] >= before["exact"] + 0.3
    assert {log.name for log in (run.folder / "logs").glob("teacher_engine-*.log")} == {
        "teacher_engine-0.log",
        "teacher_engine-1.log",
    }


@pytest.mark.chaos
def test_a_killed_teacher_is_replaced(tmp_path: Path) -> None:
    """First the teacher's worker is killed, then its engine."""
    keys = ("algo.served_by=engine", "run.steps=60", "eval.every=0", "run.save_every=0", "run.export_hf=false")
    held = TrainingGate(tmp_path, updates=15, algorithm="distill")
    with LiveRun(tmp_path / "run", *held.overrides, *keys) as live:
        live.wait_step(5)
        worker = live.kill("TeacherWorker")
        held.allow(40)
        live.wait_step(20)
        engine = live.kill("tiny_qwen3_teacher")
        assert worker != engine
        live.wait_noticed(2)
        held.let_go()
        run = live.finish()
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    assert [recovery["tier"] for recovery in run.summary["recoveries"]] == [1, 1]
    assert run.summary["ledger"]["trained"] == 60 * 8 * 16
