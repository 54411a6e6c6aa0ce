"""Tests whole runs on realistic data: bad rows, long prompts, several files, several evaluation sets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live_run import ROOT, FinishedRun, run_to_end

pytestmark = pytest.mark.integration

MALFORMED, OVERLONG, NO_ANSWER = 7, 20, 33  # rows of the training data
BAD = {"bad_row:malformed": MALFORMED, "too_long": OVERLONG, "bad_row:answer": NO_ANSWER}
GROUP_SIZE = 16
ON_FILES = ("data=file", "reward=reverse_digits", "model.task=reverse_digits", "data.eval_size=16")
EVALUATED = ("eval.rows=16", "eval.every=3", "run.keep_best=eval/second/reward", "run.keep_last=1", "run.save_every=0")
STRICT = (
    *(*ON_FILES, *EVALUATED, "engine.context_length=512", "mode.max_staleness=0", "data.max_bad_rows=0.1"),
    *("optimizer.schedule=constant", "optimizer.lr=3e-3", "optimizer.warmup_steps=4"),
)


def reversing(numbers: list[int]) -> list[dict[str, Any]]:
    return [{"prompt": f"rev {number}", "answer": str(number)[::-1]} for number in numbers]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_training_rows(path: Path) -> str:
    rows = reversing([10000 + 37 * place for place in range(100)])
    rows[OVERLONG]["prompt"] += " 1 2 3 4" * 400
    rows[NO_ANSWER]["answer"] = None
    lines = [json.dumps(row) for row in rows]
    lines[MALFORMED] = '{"prompt": "rev 1", "answer": '
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def sets_of(folder: Path) -> str:
    second = reversing([20000 + 11 * place for place in range(20)])
    second[3]["prompt"] = ""
    return f"eval.sets={{held_out: null, second: {write_lines(folder / 'second.jsonl', second)}}}"


@pytest.fixture(scope="module")
def in_two_parts(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Returns a run of six steps, resumed to twelve steps with moved data. After the resume more rows may be bad."""
    folder = tmp_path_factory.mktemp("two-parts")
    data = write_training_rows(folder / "rows.jsonl")
    evaluated = (*STRICT, sets_of(folder))
    first = run_to_end(folder / "run", *evaluated, f"data.path={data}", "run.steps=6")
    assert first.code == 0, first.output
    for place, (reason, row) in enumerate(BAD.items()):
        assert f"{reason}" in first.output and f"data:   row {row}: {data}, line {row + 1}: " in first.output, place
    moved = folder / "elsewhere" / "train.jsonl"
    moved.parent.mkdir()
    shutil.move(data, moved)
    changes = (f"data.path={moved}", "data.max_bad_rows=0.2", "run.steps=12", "resume=auto")
    return run_to_end(folder / "run", *evaluated, *changes)


def test_bad_rows_are_left_out_named_and_persisted_and_the_books_close(in_two_parts: FinishedRun) -> None:
    assert in_two_parts.code == 0, in_two_parts.output
    in_two_parts.assert_all_samples_accounted()
    books = in_two_parts.summary["ledger"]
    assert books["trained"] == 12 * 8 * GROUP_SIZE
    assert books["dropped"].keys() == BAD.keys()  # the run met every bad row, some of them twice
    named = {row["reason"]: row for row in in_two_parts.summary["bad_rows"]}
    for reason, row in named.items():
        assert row["row"] == str(BAD[reason]) and f"line {BAD[reason] + 1}: " in row["text"]


def test_a_resume_knows_its_data_by_content(in_two_parts: FinishedRun) -> None:
    assert "the same data by its content from step 6 on" in in_two_parts.output
    assert "data.max_bad_rows was 0.1, is 0.2 from step 6 on" in in_two_parts.output


def test_evaluation_counts_bad_rows_apart_and_tells_each_set(in_two_parts: FinishedRun) -> None:
    evaluations = in_two_parts.summary["eval"]
    assert [evaluation["step"] for evaluation in evaluations] == [0, 3, 6, 9, 12]
    for evaluation in evaluations:
        metrics = evaluation["figures"]
        assert (
            (evaluation["rows"], evaluation["bad_rows"])
            == (metrics["held_out/rows"], metrics["held_out/bad_rows"])
            == (16, 0)
        )
        assert (metrics["second/rows"], metrics["second/bad_rows"]) == (15, 1)
        assert metrics["exact/low"] <= evaluation["exact"] == metrics["held_out/exact"] <= metrics["exact/high"]


def test_the_best_checkpoint_is_kept_beside_the_newest(in_two_parts: FinishedRun) -> None:
    values = {evaluation["step"]: evaluation["figures"]["second/reward"] for evaluation in in_two_parts.summary["eval"]}
    best = max(sorted(values), key=lambda step: values[step])
    assert in_two_parts.summary["best"] == {"metric": "eval/second/reward", "step": best, "value": values[best]}
    kept = set(in_two_parts.checkpoints())
    if best > 0:  # otherwise the initial model is the best model
        assert os.readlink(in_two_parts.folder / "checkpoints" / "best") == f"step_{best:08d}"
    assert kept == {12, best} - {0} | ({12, best} & {12})


@pytest.mark.soak
def test_the_same_data_and_seed_give_the_same_run_to_the_bit(in_two_parts: FinishedRun, tmp_path: Path) -> None:
    """Compares an uninterrupted run and a colocate run. Bad rows do not change trained samples or their batches."""
    data = write_training_rows(tmp_path / "rows.jsonl")
    overrides = (*STRICT, sets_of(tmp_path), "mode=colocate", f"data.path={data}", "run.steps=12")
    straight = run_to_end(tmp_path / "run", *overrides)
    assert straight.code == 0, straight.output
    assert straight.summary["ledger"] == in_two_parts.summary["ledger"]
    assert len(straight.steps()) == len(in_two_parts.steps()) == 12
    for ours, theirs in zip(straight.steps(), in_two_parts.steps(), strict=True):
        for name in ("reward", "tokens", "loss", "grad_norm", "logprob_gap_max"):
            assert ours[name] == theirs[name], name
    weights = in_two_parts.weights()
    assert all(tensor.equal(weights[name]) for name, tensor in straight.weights().items())
    assert straight.summary["eval"][-1] == in_two_parts.summary["eval"][-1]


def test_relax_eval_finds_what_the_run_found(in_two_parts: FinishedRun, tmp_path: Path) -> None:
    """Evaluates the newest checkpoint with the run's settings on a new engine."""
    done = subprocess.run(
        [sys.executable, "-m", "relax_core", "eval", str(in_two_parts.folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = in_two_parts.folder.glob("evaluations/step_12/*/evaluation.json")
    result = json.loads(file.read_text())
    metrics = in_two_parts.summary["eval"][-1]["figures"]
    assert (result["step"], result["checkpoint"]) == (12, str(in_two_parts.folder / "checkpoints" / "step_00000012"))
    for eval_set in result["sets"]:
        assert eval_set["figures"]["exact"]["value"] == metrics[f"{eval_set['name']}/exact"]
        assert eval_set["figures"]["reward"]["value"] == pytest.approx(metrics[f"{eval_set['name']}/reward"])
    assert [eval_set["bad_rows"] for eval_set in result["sets"]] == [{}, {"bad_row:prompt": 1}]
    assert "held_out, 16 prompts" in done.stdout and str(file) in done.stdout


def test_a_mixture_with_stop_strings_ends_early_where_nothing_gets_better(tmp_path: Path) -> None:
    """With a learning rate near 0, the first evaluation remains the best evaluation."""
    many = write_lines(tmp_path / "many.jsonl", reversing(list(range(10000, 10060))))
    few_rows = reversing(list(range(20000, 20010)))
    few_rows[0]["prompt"] += " 1 2 3 4" * 400
    few = write_lines(tmp_path / "few.jsonl", few_rows)
    run = run_to_end(
        tmp_path / "run",
        *("data=file", f"data.paths={{{many}: 3, {few}: 1}}", "data.eval_size=8", "data.overlong=truncate_middle"),
        "engine.context_length=512",
        *("reward=reverse_digits", "model.task=reverse_digits", "rollout.stop=['0','99']", "run.epochs=9"),
        *("optimizer.lr=1e-9", "optimizer.schedule=linear", "mode.max_staleness=0", "run.save_every=0"),
        *("eval.every=2", "eval.rows=8", "eval.samples=4", "eval.temperature=1.0"),
        *("run.keep_best=eval/pass@4", "run.patience=2"),
    )
    assert run.code == 0, run.output
    assert "1 prompts are too long for the context, and are shortened" in run.output
    evaluations = run.summary["eval"]
    best = max(evaluations, key=lambda evaluation: evaluation["figures"]["pass@4"])
    ended = run.summary["steps"]
    assert run.summary["outcome"] == "finished" and ended < 70
    assert run.summary["best"]["step"] == best["step"] and ended == best["step"] + 4 == evaluations[-1]["step"]
    assert run.checkpoints()[-1] == ended
    books = run.summary["ledger"]
    assert (books["trained"], books["dropped"], books["lost"]) == (ended * 8 * GROUP_SIZE, {}, 0)
    for evaluation in evaluations:
        metrics = evaluation["figures"]
        assert metrics["pass@2"] <= metrics["pass@4"] and evaluation["exact"] <= metrics["pass@2"]
        assert metrics["pass@4/low"] <= metrics["pass@4"] <= metrics["pass@4/high"]
    texts = [json.loads(line) for line in (run.folder / "texts.jsonl").read_text().splitlines()]
    responses = [row["response"] for text in texts for row in text["rows"]]
    assert not any("0" in response[:-1] or "99" in response[:-1] for response in responses)
