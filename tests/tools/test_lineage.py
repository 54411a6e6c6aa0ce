"""Tests the lineage tool on a small run's ledger."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from msgspec import msgpack
from msgspec.structs import replace

from relax_core.contracts.columns import decode_episodes
from relax_core.contracts.tree import Turn
from relax_core.tools.lineage import main
from tests.bus.make_rows import for_actor
from tests.bus.persisted_run import PersistedRun, T, generated_row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns the folder of a run with two groups trained at step 0, one dropped group and one open group."""
    run = PersistedRun(tmp_path / "run" / "ledger.sqlite")
    run.roll_out(2)
    run.train()
    third, _ = run.core.admit(2)
    run.core.drop(third.group_uid, reason="engine failed")
    assert run.core.lease(for_actor(1)) is None
    run.journal.close(timeout_s=T)
    return tmp_path / "run"


def test_a_sample_is_told_line_by_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "uid=g00000001.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "g00000001.1  trained"
    assert [line.split("s  ", 1)[1].split("  ")[0].strip() for line in lines[1:6]] == [
        "issued",
        "generated",
        "rewarded",
        "leased",
        "trained",
    ]
    assert lines[2].endswith("engine-0: tokens 0 to 1 by weights 0, tokens 2 to 2 by weights 1; stop")
    assert lines[3].endswith("1.25 (exact 0)")
    assert lines[5].endswith("at step 0, oldest weights 0, staleness 0")
    assert lines[6] == "uid=g00000001.1: 1 samples: trained 1"
    assert lines[7] == (
        "whole run: 8 issued: 4 trained; dropped: engine failed 2; open: issued 2; lost 0; trained twice 0"
    )


def test_the_turns_of_an_episode_are_told_with_engine_tool_times_reward_and_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = PersistedRun(tmp_path / "run" / "ledger.sqlite")
    (admission,) = run.core.admit(1)
    row = generated_row(admission)
    turns = [
        Turn(2, 3, "engine-0", [(0, 1)], "stop", None, 50.0, 50.25, tools=["multiply", "multiply"], env_ms=1.5),
        Turn(3, 5, "engine-1", [(0, 1), (1, 1)], "stop", 1.0, 51.0, 51.0625, env_ms=0.25),
    ]
    why = "judge main: 1 ('it is\\n1')"
    made = decode_episodes(row.columns["episodes"])
    episodes = [replace(episode, turns=turns, ended="env_done", why=why) for episode in made]
    columns = {**row.columns, "episodes": msgpack.encode(episodes)}
    run.core.put([replace(row, columns=columns)])
    run.journal.close(timeout_s=T)
    assert main([str(tmp_path / "run"), "uid=g00000000.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = [line.split(" s  ", 1)[1] for line in lines[1:6]]
    assert told[1:] == [
        "turn 1     engine-0: tokens 0 to 0 by weights 0 in 250.0 ms; stop; calls multiply, multiply; env 1.5 ms",
        "turn 2     engine-1: tokens 0 to 0 by weights 0, tokens 1 to 1 by weights 1 in 62.5 ms; stop; env 0.2 ms; "
        "reward 1",
        "generated  turns 2, sampled tokens 3; env_done",
        "rewarded   1.25 (exact 0): judge main: 1 ('it is\\n1')",
    ]
    assert time.strftime("%H:%M:%S", time.localtime(50.0)) + ".000" in lines[2]


def test_filters_are_joined_by_and(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "reason=engine failed", "step=1"]) == 0
    assert "2 samples: dropped 2" in capsys.readouterr().out
    assert main([str(folder), "reason=engine failed", "step=0"]) == 0
    assert "0 samples: 0" in capsys.readouterr().out


def test_json_has_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "group=g00000000", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["counts"] == {"trained": 2} and output["filters"] == {"group": "g00000000"}
    assert [event["event"] for event in output["samples"][0]["events"]] == ["issued", "put", "leased", "trained"]
    assert output["samples"][1]["events"][1]["made"]["reward"] == 1.25
    assert output["books"]["lost"] == output["books"]["trained_twice"] == [] and output["books"]["issued"] == 8


def test_an_open_sample_of_a_finished_run_is_lost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "summary.json").write_text(json.dumps({"outcome": "finished", "ledger": {"open": 0}}))
    assert main([str(folder)]) == 1
    assert "lost 2; trained twice 0\nlost: g00000003.0, g00000003.1" in capsys.readouterr().out
    for outcome, still_open in (("stopped", 0), ("finished", 2)):  # the second run is a resumed run with fewer steps
        (folder / "summary.json").write_text(json.dumps({"outcome": outcome, "ledger": {"open": still_open}}))
        assert main([str(folder)]) == 0
        assert "lost 0; trained twice 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("uid=g3.7", "uid=g3.7: no such uid. Nearest: g00000003.1; issued last: g00000003.1"),
        ("group=77", "group=77: no such group. Nearest: g00000003; issued last: g00000003"),
        ("step=9", "step=9: no event names it. Steps with events: 0 to 1"),
        ("reason=engin failed", "Nearest: 'engine failed'. Reasons with events: engine failed (2)"),
        ("stp=4", "'stp=4' is not a filter. Did you mean step=? Filters: uid=…, group=…, step=…, reason=…"),
        ("uid", "'uid' is not a filter."),
        ("step=last", "step=last: give the number of a train step"),
    ],
)
def test_a_question_without_an_answer_says_what_there_is(
    question: str, answer: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), question]) == 2
    assert answer in capsys.readouterr().err


def test_no_such_run_names_those_beside_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder.with_name("rum")), "step=1"]) == 2
    assert f"Newest beside it: {folder}" in capsys.readouterr().err
