"""A run tells somebody of its start, of a rule that is true and of its end; a dead receiver costs it nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.live_run import run_to_end
from tests.observe.receivers import http_receiver
from tests.ports import free_port

pytestmark = pytest.mark.integration

RULE = "actor/tokens > 1 for 3 steps"


def test_a_run_tells_what_happens_to_it(tmp_path: Path) -> None:
    with http_receiver() as told:
        urls = tmp_path / "urls"
        urls.write_text(f"json://me:a-secret@127.0.0.1:{told.port}\njson://127.0.0.1:{free_port()}\n")
        urls.chmod(0o600)
        run = run_to_end(
            tmp_path / "run",
            *("run.steps=12", "run.export_hf=false", "eval.every=0", f"notify.urls_file={urls}"),
            *(f"notify.rules=['{RULE}']", "notify.events=[started, rule, finished]"),
        )
    assert run.code == 0, run.output
    titles = [title.partition(": ")[2] for title, _ in told.messages]
    assert titles == ["the run has started", RULE, "the run has finished"], told.messages
    texts = [text for _, text in told.messages]
    assert "actor/tokens is " in texts[1] and "of 12" in texts[1] and str(run.folder) in texts[1]
    kept = [json.loads(line) for line in (run.folder / "alarms.jsonl").read_text().splitlines()]
    assert [one["event"] for one in kept] == ["started", "rule", "finished"]
    assert run.output.count("did not take") == 3, "each of the three is tried, and told in the log"
    assert "a-secret" not in run.output + "".join(texts)
    assert not any("a-secret" in file.read_text(errors="replace") for file in (run.folder / "logs").glob("*.log"))
