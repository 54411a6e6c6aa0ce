"""Tests a whole run with an env of several turns: every log-prob equals the engine's, and the ledger is complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import isolated_number_guess
from relax_core.observe.event_log import read_metrics
from relax_core.tools import lineage, play
from tests.integration.live_run import run_to_end
from tests.observe.metrics_page import not_described

pytestmark = pytest.mark.integration

TOLERANCE = 2e-5
ISOLATED_GUESS = isolated_number_guess.__file__


def test_a_game_of_several_turns_trains_on_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Running turns are aborted at a weight change and continue with the new weights. The reward scores the last
    response, so rewards differ within a group.
    """
    run = run_to_end(
        tmp_path / "run",
        "env=number_guess",
        "engine.context_length=192",
        "algo.group_size=4",
        "rollout.prompts_per_step=4",
        "mode.max_staleness=1",
        "rollout.partial=abort",
        "run.steps=4",
        "run.save_every=4",
        "run.export_hf=false",
        "eval.every=0",
    )
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    assert len(run.steps()) == 4
    gap = run.summary["logprob_gap"]
    assert gap["tokens"] > 0 and gap["max"] <= TOLERANCE
    assert any(values["grad_norm"] > 0.0 for values in run.steps())
    assert run.summary["ledger"]["trained"] == 4 * 4 * 4
    episodes = run.summary["episodes"]
    assert sum(episodes["ended"].values()) == pytest.approx(1.0) and episodes["given_up"] == 0.0
    assert 1.0 < episodes["turns"] <= episodes["turns_p99"] <= 3.0
    assert 0.0 < episodes["cached_share"] < 1.0 and 0.0 < episodes["queue_s"] <= episodes["engine_s"]
    records = read_metrics(run.folder)
    assert not not_described(
        {f"{record.source}/{name}" for record in records for name in record.values} - {"run/resumed"}
    )

    assert lineage.main([str(run.folder), "step=0", "--json"]) == 0
    puts = [event for sample in json.loads(capsys.readouterr().out)["samples"] for event in sample["events"]]
    turns = [turn for event in puts if event["event"] == "put" for turn in event["made"]["turns"]]
    assert len(turns) > 4 * 4 and all(turn["ended_s"] >= turn["began_s"] > 0 for turn in turns)

    # The checkpoint plays: the terminal shows complete conversations with marked responses.
    assert play.main([f"checkpoint={run.folder}", "--episodes=2", "env.highest=3"]) == 0
    output = capsys.readouterr().out
    assert output.count("user: guess a number from 1 to 3\nassistant: ⟦") == 2
    assert re.search(r"\[(env_done|max_turns|token_budget)\]\n\[reward [0-9.]+\]\n$", output), output
    assert play.main([f"checkpoint={run.folder}", "env.lowest=3"]) == 2
    assert "env.lowest" in capsys.readouterr().err


def test_an_evaluation_leaves_the_places_of_env_workers_to_training(tmp_path: Path) -> None:
    """The evaluation has more episodes than slots. It must not occupy slots while it waits for the train step."""
    run = run_to_end(
        tmp_path / "run",
        f"env.name={ISOLATED_GUESS}",
        "env.episodes_per_worker=4",
        "engine.context_length=192",
        "algo.group_size=4",
        "rollout.prompts_per_step=4",
        "mode.max_staleness=0",
        "run.steps=3",
        "run.export_hf=false",
        "eval.every=2",
        "eval.rows=12",
    )
    assert run.code == 0, run.output
    assert len(run.steps()) == 3
    run.assert_all_samples_accounted()
