"""Tests `benchmarks.long_tail`: its runs are valid configurations, and its numbers equal numbers computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from benchmarks.countdown_task import model_config, write_rows, write_tokenizer
from benchmarks.harness import FinishedRun
from benchmarks.long_tail import WAYS, metrics_of, parse, words_of
from relax_core.config.compose import load_config


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("name", WAYS)
def test_each_run_is_a_valid_configuration(
    name: str, turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.long_tail.model_folder", lambda: tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model_config()))
    save_file({}, tmp_path / "model.safetensors")
    write_tokenizer(tmp_path)
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, [[4] * turns], seed=0)
    given = parse(["--turns", str(turns)])
    config = load_config([*words_of(given, rows, seed=3), *WAYS[name]])
    reward: Any = config.reward
    assert (reward.cap, config.rollout.max_new_tokens) == (given.cap, turns * given.cap)
    if turns > 1:
        env: Any = config.env
        assert (env.max_turns, env.max_turn_tokens, env.tool_wait_s, env.step_timeout_s) == (3, 680, 0.5, 34.0)


def test_rates_leave_out_the_first_steps_and_the_last() -> None:
    spoiled = {"step_ms": 1e6, "wait_ms": 1e6, "train_ms": 1e6}
    fine = {"step_ms": 1000.0, "wait_ms": 250.0, "train_ms": 500.0}
    counts = {"samples": 48.0, "tokens": 3000.0, "staleness_mean": 2.0}
    actor = {step: counts | (fine if 2 <= step < 9 else spoiled) | {"reward": 0.1 * step} for step in range(10)}
    run = FinishedRun(summary={"ledger": {"dropped": {"stale": 3}}}, records=[])
    run.__dict__["steps"] = lambda source="actor": actor
    found = metrics_of(run, skipped=2)
    assert (found["samples/s"], found["tokens/s"], found["length"]) == pytest.approx((48.0, 3000.0, 62.5))
    assert (found["waiting"], found["training"], found["stale"], found["surplus"]) == (0.25, 0.5, 3.0, 0.0)
    assert found["reward"] == pytest.approx(0.7)


@pytest.mark.parametrize("arguments", [["--turns", "3", "--cap", "681"], ["--skip", "38"]])
def test_runs_without_room_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert arguments[-2] in capsys.readouterr().err
