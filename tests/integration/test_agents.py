"""Tests whole runs with agents: real processes call the endpoint, and the run trains their tokens."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from examples.agents.calculator import ask, play
from relax_core.observe.event_log import read_metrics
from tests.integration.live_run import MARK, LiveRun, run_to_end
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
        f"agent.env.{MARK}=${{oc.env:{MARK}}}",  # the test finds remaining processes by this mark
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
    run.assert_all_samples_accounted()
    assert run.summary["ledger"]["trained"] == 3 * 2 * 4
    gap = run.summary["logprob_gap"]
    assert gap["tokens"] > 0 and gap["max"] <= TOLERANCE
    episodes = run.summary["episodes"]
    assert episodes["ended"] == {"env_done": 1.0} and episodes["agent"]["segments"] == 1.0
    assert episodes["agent"]["requests"] == pytest.approx(episodes["turns"]) and episodes["agent"]["foreign"] == 0.0
    records = read_metrics(run.folder)
    assert not not_described(
        {f"{record.source}/{name}" for record in records for name in record.values} - {"run/resumed"}
    )
    last = [record.values for record in records if record.source == "rollout"][-1]
    assert last["tokens/trained"] == last["tokens/sampled"] > 0 and last["env/calls"] >= 0.0
    evaluated = [record.values for record in records if record.source == "eval"]
    assert len(evaluated) == 2 and all(values["ended/env_done"] == 1.0 for values in evaluated)
    assert not list((run.folder / "logs").glob("agents*")), "folders of tasks are removed with their agents"
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as database:
        told = json.dumps([list(map(str, row)) for row in database.execute("SELECT * FROM events")])
    for text in (told, *(file.read_text() for file in (run.folder / "logs").glob("*.log")), run.output):
        assert "rlx-" not in text.replace("/rlx-", ""), "a session's key is in no file"


class Elsewhere(threading.Thread):
    """Runs an external agent, which the run did not start. It plays tasks until the run has ended."""

    def __init__(self, run: LiveRun, *, leaves_first: bool) -> None:
        super().__init__(daemon=True)
        self._run, self._leaves = run, leaves_first
        self.played: list[str] = []
        self.left = ""

    def run(self) -> None:
        while self._run.running():
            try:
                given = self._post("")
                if self._leaves:
                    ask([{"role": "user", "content": "2 times 3 ?"}], given["base_url"], given["api_key"])
                    self._leaves, self.left = False, given["uid"]
                    continue
                result = play(given["task"], given["base_url"], given["api_key"])
                assert self._post(f"/{given['session']}/end", result)["ended"]
                self.played.append(given["uid"])
            except OSError as error:  # the endpoint is not up, there is no task, or the attempt has ended
                if isinstance(error, urllib.error.HTTPError) and error.code not in (410, 429, 503):
                    raise
                time.sleep(0.2)

    def _post(self, path: str, body: Any = None) -> dict[str, Any]:
        folder = self._run.folder
        request = urllib.request.Request(
            f"{(folder / 'endpoint').read_text().strip()}/v1/relax/sessions{path}",
            data=json.dumps(body or {}).encode(),
            headers={"Authorization": f"Bearer {(folder / 'token').read_text().strip()}"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return dict(json.load(reply))


def test_agents_elsewhere_play_a_run_and_one_that_falls_silent_is_replaced(tmp_path: Path) -> None:
    """The task of the silent agent is assigned to another agent, and each episode is trained once."""
    with LiveRun(
        tmp_path / "run",
        "experiment=calculator",
        "env=agent",
        "agent.timeout_s=20",
        "algo.group_size=4",
        "rollout.prompts_per_step=2",
        "run.steps=3",
        "run.save_every=0",
        "run.export_hf=false",
        "eval.every=0",
    ) as live:
        agents = [Elsewhere(live, leaves_first=number == 0) for number in range(6)]
        for agent in agents:
            agent.start()
        run = live.finish()
        for agent in agents:
            agent.join(60)
            assert not agent.is_alive()
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    assert run.summary["ledger"]["trained"] == 3 * 2 * 4
    played = [uid for agent in agents for uid in agent.played]
    assert agents[0].left in played and len(set(played)) == len(played) >= 3 * 2 * 4
    assert run.summary["logprob_gap"]["max"] <= TOLERANCE
    assert run.summary["episodes"]["restarts"] > 0.0
