"""Tests the kill of a judge's engine during a run: answers have no reward until its restart, and the run continues."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from relax_core.observe.event_log import read_metrics
from relax_core.tools.make_tiny import tiny_model_folder
from tests.integration.live_run import LiveRun
from tests.integration.training_gate import TrainingGate

pytestmark = [pytest.mark.integration, pytest.mark.chaos]
STEPS = 20


def test_a_killed_judge_costs_verdicts_and_no_episode_is_lost(tmp_path: Path) -> None:
    """The tiny judge's verdict is the number in its text. Without a number there is no reward."""
    judge = tmp_path / "judge"
    shutil.copytree(tiny_model_folder("tiny_qwen3", task="reverse_digits"), judge)
    (tmp_path / "prompt.jinja").write_text("rev {{ response }}")
    known = {"question": "rev 12", "answer": "12", "verdict": 0}
    (tmp_path / "known.jsonl").write_text(json.dumps(known))
    held = TrainingGate(tmp_path, updates=6)
    overrides = (
        "reward=genrm",
        f"reward.judges.main.model={judge}",
        f"reward.judges.main.prompt={tmp_path / 'prompt.jinja'}",
        "reward.judges.main.parse=number 0..99999999",
        "reward.judges.main.max_new_tokens=9",
        "reward.judges.main.timeout_s=1.0",
        f"reward.check.path={tmp_path / 'known.jsonl'}",
        "reward.check.min=0.0",
        "reward.max_failed=1.0",
        f"run.steps={STEPS}",
        "eval.every=0",
        "run.save_every=0",
        *held.overrides,
    )
    with LiveRun(tmp_path / "run", *overrides) as live:
        live.wait_step(2)
        live.kill(f"--model-path {judge}")
        live.wait_noticed(1)
        held.let_go()
        run = live.finish()
    assert run.code == 0, run.output
    assert run.summary["steps"] == STEPS
    run.assert_all_samples_accounted()
    assert [recovery["tier"] for recovery in run.summary["recoveries"]] == [1]
    records = read_metrics(run.folder)
    assert [record.source for record in records].count("judge_check") == 1
    verdicts = [record.values for record in records if record.values.get("judge/main/verdicts")]
    assert verdicts[-1]["judge/main/none"] < 1.0, "the judge is back"
    texts = [json.loads(line) for line in (run.folder / "texts.jsonl").read_text().splitlines()]
    judged = [row for text in texts if text["kind"] == "judged" for row in text["rows"]]
    assert {"uid", "response", "reward", "why"} <= judged[0].keys()
    assert any(row["why"].startswith("judge main: ") for row in judged)
