"""Tests the README's example with a real file: a JSONL file, scored by math-verify in killable workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.live_run import run_to_end

pytestmark = pytest.mark.integration


def test_math_file_trains_and_evaluates(tmp_path: Path) -> None:
    short = ("run.steps=3", "eval.rows=16", "run.save_every=0", "reward.timeout_s=60")
    run = run_to_end(tmp_path / "run", "experiment=math_file", *short)
    assert run.code == 0, run.output
    assert run.summary["steps"] == 3
    run.assert_all_samples_accounted()
    assert set(run.summary["ledger"]["dropped"]) <= {"reward_failed"}
    assert [(evaluation["step"], evaluation["rows"]) for evaluation in run.summary["eval"]] == [(0, 16), (3, 16)]
    texts = [json.loads(line) for line in (run.folder / "texts.jsonl").read_text().splitlines()]
    assert texts[0]["rows"][0]["prompt"].endswith("?")
    assert all(0.0 <= values["reward"] == values["exact"] <= 1.0 for values in run.steps())
