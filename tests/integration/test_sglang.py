"""Tests the demo on a real SGLang server: it learns as on the embedded engine, and a killed server restarts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.tools.make_tiny import tiny_model_folder
from tests.contracts.engine.harness import SGLANG_PYTHON
from tests.integration.live_run import FinishedRun, LiveRun, run_to_end
from tests.integration.training_gate import TrainingGate

pytestmark = [pytest.mark.sglang, pytest.mark.integration]
SGLANG = ("engine=sglang", f"engine.python={SGLANG_PYTHON}")
GAP = 1e-4  # largest float32 log-prob difference between engine and trainer on tokens of the newest weights


def assert_on_policy(run: FinishedRun) -> None:
    assert run.code == 0, run.output
    assert run.summary["logprob_gap"]["tokens"] > 1000 and run.summary["logprob_gap"]["max"] < GAP
    run.assert_all_samples_accounted()


def test_the_demo_learns_and_a_server_that_is_killed_comes_back_with_the_newest_weights(tmp_path: Path) -> None:
    held = TrainingGate(tmp_path, updates=8)
    overrides = ("run.steps=70", "eval.every=70", "eval.rows=64", "run.heartbeat_timeout_s=60", *held.overrides)
    with LiveRun(tmp_path / "demo", *SGLANG, *overrides) as live:
        live.wait_step(4)
        live.kill("sglang/sglang_process.py")
        held.let_go()
        run = live.finish(deadline_s=900.0)
    assert_on_policy(run)
    assert len(run.steps()) == 70
    rewards = [values["reward"] for values in run.steps()]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1


def test_a_server_of_somebody_elses_is_met_by_its_address_and_left_running(tmp_path: Path) -> None:
    config = load_config([*SGLANG, "engine.context_length=64"])
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "key").write_text("key-of-the-server")
    process = EngineProcess.start(
        EngineLaunch(
            model_folder=tiny_model_folder("tiny_qwen3", task="reverse_digits"),
            engine=config.engine,
            dtype="float32",
            token_file=tmp_path / "key",
            log_file=tmp_path / "engine.log",
        )
    )
    try:
        run = run_to_end(
            tmp_path / "attached",
            "engine=sglang",
            f"engine.urls=[{process.url}]",
            f"engine.token_file={tmp_path / 'key'}",
            "run.steps=6",
            "eval.every=0",
        )
        assert run.code == 0, run.output
        assert run.summary["logprob_gap"]["tokens"] > 0 and run.summary["logprob_gap"]["max"] < GAP
        run.assert_all_samples_accounted()
        assert process.poll() is None
    finally:
        process.stop(timeout_s=10.0)


@pytest.mark.soak
def test_a_judge_on_a_server_of_its_own_gives_the_rewards(tmp_path: Path) -> None:
    """The tiny judge's verdict is the number in its text. Without a number there is no reward."""
    judge = tmp_path / "judge"
    shutil.copytree(tiny_model_folder("tiny_qwen3", task="reverse_digits"), judge)
    (tmp_path / "prompt.jinja").write_text("rev {{ response }}")
    (tmp_path / "known.jsonl").write_text(json.dumps({"question": "rev 12", "answer": "12", "verdict": 0}))
    run = run_to_end(
        tmp_path / "judged",
        *SGLANG,
        "reward=genrm",
        f"reward.judges.main.model={judge}",
        "reward.judges.main.engine=sglang",
        f"reward.judges.main.prompt={tmp_path / 'prompt.jinja'}",
        "reward.judges.main.parse=number 0..99999999",
        "reward.judges.main.max_new_tokens=9",
        f"reward.check.path={tmp_path / 'known.jsonl'}",
        "reward.check.min=0.0",
        "reward.max_failed=1.0",
        "run.steps=4",
        "eval.every=0",
        "run.save_every=0",
        deadline_s=900.0,
    )
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    assert run.summary["ledger"]["trained"] > 0
    judged = run.summary["judges"]["main"]
    assert judged["verdicts"] > 0 and judged["none"] < 1.0
