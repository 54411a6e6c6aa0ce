"""A whole run that agents play: real processes ask the endpoint, and their tokens are trained as any others."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from relax_core.observe.service.sinks import read_metrics
from tests.integration.live_run import MARK, run_to_end
from tests.observe.metrics_page import not_described

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 2e-5


def test_a_program_with_a_tool_of_its_own_trains_and_is_evaluated(tmp_path: Path) -> None:
    run = run_to_end(
        tmp_path / "run",
        "experiment=calculator",
        "env=agent",
        f"agent.command=python {ROOT / 'examples' / 'agents' / 'calculator.py'}",
        f"agent.env.{MARK}=${{oc.env:{MARK}}}",  # by which the test sees that no process is left
        "algo.group_size=4",
        "rollout.prompts_per_step=2",
        "mode.max_staleness=1",
        "run.steps=3",
        "run.save_every=0",
        "run.export_hf=false",
        "eval.every=3",
        "eval.rows=4",
    )
    assert run.code == 0, run.output
    run.assert_books_closed()
    assert run.summary["ledger"]["trained"] == 3 * 2 * 4
    gap = run.summary["logprob_gap"]
    assert gap["tokens"] > 0 and gap["max"] <= TOLERANCE
    episodes = run.summary["episodes"]
    assert episodes["ended"] == {"env_done": 1.0} and episodes["agent"]["segments"] == 1.0
    assert episodes["agent"]["requests"] == pytest.approx(episodes["turns"]) and episodes["agent"]["foreign"] == 0.0
    records = read_metrics(run.folder)
    assert not not_described({f"{one.source}/{name}" for one in records for name in one.values} - {"run/resumed"})
    last = [one.values for one in records if one.source == "rollout"][-1]
    assert last["tokens/trained"] == last["tokens/sampled"] > 0 and last["env/calls"] >= 0.0
    evaluated = [one.values for one in records if one.source == "eval"]
    assert len(evaluated) == 2 and all(one["ended/env_done"] == 1.0 for one in evaluated)
    assert not list((run.folder / "logs").glob("agents*")), "the folders of tasks end with their agents"
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as database:
        told = json.dumps([list(map(str, row)) for row in database.execute("SELECT * FROM events")])
    for text in (told, *(file.read_text() for file in (run.folder / "logs").glob("*.log")), run.output):
        assert "rlx-" not in text.replace("/rlx-", ""), "a session's key is in no file"
