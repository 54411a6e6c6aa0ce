"""Tests the dashboard's server: the response of each address, access checks, and run folders in every state."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_core.cli.dashboard_command import main
from relax_core.observe.alarms import AlarmLog
from relax_core.server.listed_runs import ListedRuns
from relax_core.server.request_guard import POLICY
from relax_core.server.run_events import thinned
from relax_core.server.run_folders import (
    NotInside,
    find_runs,
    inside,
    log_chunk,
    log_files,
    run_id,
    run_state,
    search_log,
)
from relax_core.server.run_reader import RunReader
from tests.server.made_run import COUNTED, HOSTILE, make_run
from tests.server.page_server import DEADLINE_S, Server


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo" / "first")


@pytest.fixture(scope="module")
def server(run_dir: Path) -> Iterator[Server]:
    made = Server(run_dir.parents[1])
    made.enter()
    yield made
    made.stop()


@pytest.fixture
def base(run_dir: Path) -> str:
    return f"/api/run/{run_id(run_dir.resolve())}"


def test_a_link_works_once_and_gives_the_key_of_a_session(run_dir: Path) -> None:
    made = Server(run_dir)
    try:
        token = made.session.link_token.encode()
        assert made.ask("/api/runs")[0] == 401
        assert made.ask("/api/session", data=b"wrong")[0] == 401
        assert made.ask("/api/session", data=b"x" * 70000)[0] == 413
        status, headers, body = made.ask("/api/session", data=token)
        assert status == 200 and "set-cookie" not in headers
        key = json.loads(body)["session"]
        assert made.ask("/api/session", data=token)[0] == 401
        for wrong in ("", "Bearer guess", f"Basic {key}", key, f"Bearer {key}x", "Bearer \xff"):
            assert made.ask("/api/runs", Authorization=wrong)[0] == 401, wrong
        assert made.ask("/api/runs", Cookie=f"relax_dashboard_{made.port}={key}")[0] == 401
        assert made.ask("/api/runs", Authorization=f"Bearer {key}")[0] == 200
    finally:
        made.stop()


def test_another_host_or_origin_gets_nothing(server: Server) -> None:
    assert server.ask("/api/runs", Host=f"evil.example:{server.port}")[0] == 403
    assert server.ask("/", Host="127.0.0.1:1")[0] == 403
    assert server.ask("/api/runs", Origin="http://evil.example")[0] == 403
    assert server.ask("/api/runs", Origin=f"http://localhost:{server.port}")[0] == 200


def test_each_answer_has_the_policy_and_the_page_has_no_inline_script(server: Server) -> None:
    for path in ("/", "/static/main.js", "/api/runs", "/nothing", "/static/../dashboard_app.py"):
        status, headers, body = server.ask(path)
        assert headers["content-security-policy"] == POLICY, path
        assert headers["x-content-type-options"] == "nosniff"
        assert (status == 200) == (path in ("/", "/static/main.js", "/api/runs"))
        assert b"<script>" not in body
    assert POLICY.startswith("default-src 'none'")
    assert "unsafe" not in POLICY


def test_the_overview_and_the_curves_of_a_run(server: Server, base: str) -> None:
    (listed,) = server.json("/api/runs")
    assert listed["state"] == "finished"
    metrics = ("label", "steps_done", "steps", "reward", "exact", "samples_per_s")
    assert [listed[name] for name in metrics] == ["demo", 4, 6, 0.3, None, 10.5]
    found = server.json(base)
    assert [found["steps_done"], found["steps"], found["resumes"]] == [4, 6, [2]]
    assert found["ledger"] == {"dropped": 3, "issued": 10, "put": 8, "trained": 7}
    assert found["samples"]["state"] == {"dropped": 3, "trained": 7}
    assert found["staleness"] == {"0": 7}
    curves = server.json(f"{base}/series?tags=actor/reward,actor/logprob_gap_max,nothing")["curves"]
    assert curves["actor/reward"] == [[0, 1, 2, 3], [0.0, 0.1, 0.25, 0.3]]  # step 2 has the value from after the resume
    assert curves["actor/logprob_gap_max"] == [[0], [None]]  # NaN is a gap, and steps without a comparison are missing
    assert curves["nothing"] == [[], []]


def test_figures_of_the_list_are_numbers_or_unknown(tmp_path: Path) -> None:
    """Malformed lines are skipped. The newest record of an evaluation is used."""
    run = make_run(tmp_path / "run")
    record = '{"type":"numbers","source":"%s","step":%s,"time_s":%s,"values":{"exact":%s,"reward":%s}}\n'
    with (run / "events" / "0002.actor-0.0.jsonl").open("w") as file:
        file.write(record % ("eval", 4, 20.0, 0.25, 0.5) + record % ("actor", 7, 30.0, 0.5, "null"))
        file.write(record % ("eval", 5, 1, '"<b>"', 1) + record % ("actor", 9, 1e300, 1, 1))
        file.write('{"source":"actor","step":9')
    (run / "summary.json").write_text('{"outcome":"finished","samples_per_s":"<b>","eval":{},"reward":[1]}')
    (listed,) = ListedRuns()({"a": run})
    found = [listed[name] for name in ("steps_done", "reward", "exact", "samples_per_s", "newest_s")]
    assert found == [8, None, 0.25, None, 30.0]
    shutil.rmtree(run / "events")
    (run / "config.yaml").write_text("name: [a]\nrun: {steps: true}\n")
    (listed,) = ListedRuns()({"a": run})
    assert [listed[name] for name in ("state", "label", "steps_done", "steps", "exact")] == [
        "finished",
        "",
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("event", "alarm"),
    [("started", False), ("finished", False), ("stopped", False), ("failed", True), ("stalled", True)],
)
def test_a_good_end_is_no_alarm(tmp_path: Path, event: str, alarm: bool) -> None:
    run = make_run(tmp_path / "run")
    AlarmLog(run, repeat_s=0.0).report(event, "the run", title=event, text=lambda: event)
    reader = RunReader(run, None)
    try:
        assert [(notice["event"], notice["alarm"]) for notice in reader.overview()["alarms"]] == [(event, alarm)]
    finally:
        reader.close()


def test_samples_by_filter_words_group_and_token(server: Server, base: str) -> None:
    found = server.json(f"{base}/samples?state=dropped&order=oldest")
    assert [row["reason"] for row in found["rows"]] == ["stale", "reward_failed", "reward_failed"]
    found = server.json(f"{base}/samples?words=SCRIPT")
    assert [found["count"], found["searched"], found["next"]] == [10, 10, None]
    older = server.json(f"{base}/samples?words=SCRIPT&before=4")
    assert [row["id"] for row in older["rows"]] == [3, 2, 1]
    (row,) = server.json(f"{base}/samples?uid=g00000001.1")["rows"]
    sample = server.json(f"{base}/sample?id={row['id']}")
    assert HOSTILE in "".join(token["text"] for token in sample["tokens"])
    last = sample["tokens"][-1]
    assert last["advantage"] == pytest.approx(-0.5)
    assert last["trainer_logprob"] == pytest.approx(last["logprob"] + 0.25)
    assert last["trained"] is True
    (counted,) = server.json(f"{base}/samples?uid=g0000000{COUNTED}.1")["rows"]
    assert counted["state"] == "trained" and counted["step"] == COUNTED
    tokens = server.json(f"{base}/sample?id={counted['id']}")["tokens"]
    assert tokens[-1]["advantage"] == pytest.approx(-0.5) and "trainer_logprob" not in tokens[-1]
    assert [token.get("turn") for token in sample["tokens"]] == [None, None, None, 0, 0, 0]
    assert [turn["tokens"] for turn in sample["turns_of"]] == [3]
    group = server.json(f"{base}/group?uid={sample['group_uid']}")
    assert [row["uid"] for row in group["rows"]] == [f"{sample['group_uid']}.0", f"{sample['group_uid']}.1"]
    assert server.ask(f"{base}/samples?reward_min=much")[0] == 400
    assert server.ask(f"{base}/sample?id=999")[0] == 404


def test_the_timeline_the_samples_of_a_step_and_the_engines(server: Server, base: str) -> None:
    found = server.json(f"{base}/timeline?first=2&last=3")
    assert [found["first"], found["last"], found["steps_done"]] == [2, 3, 4]
    assert found["shares"]["wait"] == 0.75
    assert {span["lane"] for span in found["spans"]} >= {"trainer", "trainer's parts"}
    assert found["told"][0].startswith(
        "engine-1 is slow: 25% and 40 ms a train step beyond the median of engine-0, eng"
    )
    assert "engine-1" not in server.json(f"{base}/timeline?first=0&last=1")["told"][0]
    assert server.json(f"{base}/processes") == [
        {
            "name": "actor-0",
            "numbers": {"cores": 0.75, "memory_mb": 250.0, "children": 1.0},
            "most_memory_mb": 350.0,
        },
        {"name": "bus", "numbers": {"cores": 0.125}, "most_memory_mb": 0.0},
    ]
    assert server.ask(f"{base}/timeline?first=90&last=91")[0] == 404
    assert server.ask(f"{base}/timeline?first=much")[0] == 400
    rows = server.json(f"{base}/batch?step=0")["rows"]
    assert [(row["uid"], row["version"], row["reason"]) for row in rows] == [
        ("g00000000.0", 0, ""),
        ("g00000000.1", 0, "stale"),
    ]
    assert all(row["issued_s"] <= row["put_s"] <= row["ended_s"] and row["leased_s"] is None for row in rows)
    assert server.ask(f"{base}/batch?step=17")[0] == 404
    (engine,) = server.json(f"{base}/engines")
    assert [engine["samples"], engine["tokens"], sum(engine["rates"])] == [10, 25, 25.0]  # all within one second


def test_the_answers_of_evaluations_by_step_and_by_prompt(server: Server, base: str, run_dir: Path) -> None:
    found = server.json(f"{base}/evaluations")
    assert [(evaluation["step"], evaluation["rows"], evaluation["exact"]) for evaluation in found] == [
        (0, 2, 0),
        (4, 2, 1),
    ]
    (form,) = server.json(f"{base}/evaluation?step=4")["look"]
    assert form["share"] == 1.0 and form["shadow"] is None and "took over" in form["notice"]
    assert server.json(f"{base}/evaluation?step=0")["look"] == []
    (row,) = server.json(f"{base}/evaluation?step=4&exact=0")["rows"]
    assert [row["prompt"], row["response"]] == ["q1", f"{HOSTILE} at 4"]
    assert server.json(f"{base}/evaluation?step=4&words=AT%204&first=1")["count"] == 2
    assert server.ask(f"{base}/evaluation?step=3")[0] == 404
    history = server.json(f"{base}/prompt?prompt=q0")
    assert [(evaluation["step"], evaluation["exact"]) for evaluation in history] == [(4, True), (0, False)]


def test_configuration_logs_and_lineage(server: Server, base: str) -> None:
    assert server.json(f"{base}/config")["values"]["run"]["steps"] == 6
    assert server.json(f"{base}/logs") == [{"name": "actor-0.log", "size": 18}]
    assert server.json(f"{base}/log?name=actor-0.log")["text"] == "first\n<b>second\n"  # the third line is incomplete
    assert server.json(f"{base}/log?name=actor-0.log&words=SECOND")["text"] == "<b>second"
    assert server.json(f"{base}/lineage")["counts"]["trained"] == 7
    (sample,) = server.json(f"{base}/lineage?uid=g00000001.0")["samples"]
    assert sample["state"] == "trained"
    for path in (
        "log?name=../config.yaml",
        "log?name=out.log",
        "log?name=/etc/passwd",
        "log?name=..%2f..%2fmetrics.jsonl",
    ):
        assert server.ask(f"{base}/{path}")[0] == 404, path
    assert server.ask("/api/run/000000000000")[0] == 404


def test_the_stream_tells_at_once(server: Server, base: str) -> None:
    address, known = f"http://127.0.0.1:{server.port}{base}/stream", {"Authorization": server.authorization}
    request = urllib.request.Request(address, headers=known)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        assert json.loads(answer.readline().removeprefix(b"data: ")) == {
            "state": "finished",
            "steps_done": 4,
            "points": 12,
        }


def test_new_records_of_an_active_run_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events" / "0000.actor-0.0.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(
        '{"type":"numbers","source":"actor","step":0,"time_s":1.0,"values":{"reward":0.5}}\n{"type":"numbers","source":"act'
    )
    reader = RunReader(tmp_path / "run", None)
    assert reader.series().steps_done == 1
    with path.open("a") as file:
        file.write('or","step":1,"time_s":3.5,"values":{"reward":null}}\nnot json\n{"type":"numbers"}\n')
        for rows in ([{"exact": True}, {"exact": False}], []):  # a repeated evaluation
            line = {"type": "texts", "kind": "eval", "step": 4, "time_s": 5.0, "rows": rows}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    series = reader.series()
    assert series.curve("actor/reward") == ([0, 1], [0.5, None])
    assert [series.steps_done, series.step_s()] == [2, 2.5]
    assert [(evaluation.step, evaluation.rows) for evaluation in reader.texts().evaluations()] == [(4, 0)]
    assert any("not an event of Relax" in problem for problem in reader.overview()["problems"])
    (tmp_path / "run").rename(tmp_path / "old")
    path.parent.mkdir(parents=True)
    path.write_text('{"type":"numbers","source":"actor","step":0,"time_s":1.0,"values":{"loss":2.0}}\n')
    assert reader.series().tags() == ["actor/loss"]
    reader.close()


def test_a_long_curve_keeps_its_least_and_largest_values() -> None:
    values: list[float | None] = [1.0] * 100_000
    values[777], values[50_000], values[60_000] = -5.0, 9.0, None
    curve = thinned(list(range(100_000)), values)
    assert len(curve.steps) <= 2000
    assert curve.steps == sorted(curve.steps)
    assert (777, -5.0) in zip(*curve, strict=True)
    assert (50_000, 9.0) in zip(*curve, strict=True)


def test_the_state_of_a_run(tmp_path: Path) -> None:
    assert run_state(tmp_path) == "crashed"
    lock = tmp_path / ".lock"
    lock.write_text(f"process {os.getpid()} of {socket.gethostname()}\n")
    assert run_state(tmp_path) == "live"
    os.utime(lock, (1.0, 1.0))  # then the process with this id started later than the lock
    assert run_state(tmp_path) == "crashed"
    lock.write_text("process 1 of another-host\n")
    (tmp_path / "metrics.jsonl").write_text("")
    assert run_state(tmp_path) == "live"
    os.utime(tmp_path / "metrics.jsonl", (1.0, 1.0))
    os.utime(lock, (1.0, 1.0))
    (tmp_path / "summary.json").write_text('{"outcome":"stopped"}')
    assert run_state(tmp_path) == "stopped"
    (tmp_path / "summary.json").write_text(json.dumps({"outcome": "failed: \x1b[31mit\nraised"}))
    assert run_state(tmp_path) == "failed: U+001B[31mit raised"
    (tmp_path / "summary.json").write_text("{}")
    assert run_state(tmp_path) == "unreadable"


def test_links_lead_nowhere(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    secret = tmp_path.parent / f"{tmp_path.name}-secret"
    secret.write_text("secret")
    (tmp_path / "logs" / "out.log").symlink_to(secret)
    (tmp_path / "logs" / "own.log").write_text("own\n")
    (tmp_path / "again").symlink_to(run_dir)
    assert [file["name"] for file in log_files(tmp_path)] == ["own.log"]
    for parts in (("logs", "out.log"), ("logs", "..", "logs", "own.log"), ("logs",)):
        with pytest.raises(NotInside):
            inside(tmp_path, *parts)
    with pytest.raises(FileNotFoundError):
        log_chunk(tmp_path, "nothing.log", None)
    assert find_runs([tmp_path]) == {}
    secret.unlink()


def test_a_log_is_read_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_bytes(b"x" * 200_000 + b"\nlast \xff\n")
    piece = log_chunk(tmp_path, "a.log", 0)
    assert len(piece["text"]) == piece["next"] == 65_536  # the server returns a line of a megabyte in pieces
    assert log_chunk(tmp_path, "a.log", None)["text"].endswith("last \ufffd\n")
    assert search_log(tmp_path, "a.log", "LAST")["found"] == 1


def test_a_copied_run_and_a_ledger_of_another_host(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy, symlinks=True)
    (copy / "ledger.sqlite-wal").write_bytes(b"")
    (copy / ".lock").write_text("process 1 of another-host\n")
    reader = RunReader(copy, None)
    assert reader.overview()["ledger"] == {}  # SQLite cannot open it
    samples = reader.overview()["samples"]
    assert samples is not None
    assert samples["state"] == {"made": 2, "put": 1, "trained": 7}  # drops are only in the ledger
    reader.close()


def test_an_empty_folder_is_served_and_a_missing_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = RunReader(tmp_path, None)
    found = reader.overview()
    assert [found["steps_done"], found["steps"], found["samples"], found["tags"]] == [0, None, None, []]
    assert main([str(tmp_path / "nothing")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_a_damaged_ledger_costs_its_numbers_alone(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy, symlinks=True)
    (copy / "ledger.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(copy / "ledger.sqlite").execute("SELECT * FROM events")
    assert RunReader(copy, None).overview()["steps_done"] == 4
