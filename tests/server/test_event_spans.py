"""Tests that restarts, recoveries and orders of a run are spans in the timeline, with files of the real writers."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from relax_core.cli.trace_command import main
from relax_core.control.recoveries import FROM_CHECKPOINT, IN_PLACE, Recoveries, recoveries_file
from relax_core.server.engine_order_store import EngineOrderStore
from relax_core.server.run_events import Timed
from relax_core.server.run_reader import RunReader
from relax_core.server.run_timeline import event_spans, make_timeline, read_orders
from tests.server.made_run import make_run

Told = tuple[str, str, float, float, int]


def steps(*ends: float) -> list[Timed]:
    return [Timed("actor", step, end_s, 0, {"step": 1000.0}) for step, end_s in enumerate(ends)]


def told(run_dir: Path, timed: list[Timed]) -> list[Told]:
    spans, problems = event_spans(run_dir, timed, read_orders(run_dir))
    assert problems == []
    return [(span.lane, span.name, span.start_s, span.end_s, span.step) for span in spans]


def test_a_restart_and_a_recovery_last_until_the_next_train_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("relax_core.control.recoveries.time.time", lambda: 1000.0 + clock[0])
    recoveries = Recoveries(recoveries_file(tmp_path), report=lambda text: None, clock=lambda: clock[0])
    clock[0] = 10.0
    recoveries.begin(IN_PLACE, "engine-0 was killed by SIGKILL", at_step=3, from_step=3, noticed=8.0)
    clock[0] = 12.0
    recoveries.step_done()
    clock[0] = 20.0
    recoveries.begin(FROM_CHECKPOINT, "the bus died", at_step=5, from_step=4)
    restart = ("restarts", "engine-0 was killed by SIGKILL", 1008.0, 1012.0, 3)
    recovery = ("recoveries", "the bus died; all services start again from step 4", 1020.0)
    assert told(tmp_path, steps(1005.0, 1012.0)) == [restart, (*recovery, 1020.0, 5)]
    # The recovery's duration is missing because its controller died. The next train step ends the recovery.
    assert told(tmp_path, steps(1005.0, 1012.0, 1027.0, 1028.0)) == [restart, (*recovery, 1027.0, 5)]
    waiting = [*steps(1005.0, 1012.0), Timed("rollout", 2, 1024.0, 0, {"generate": 1.0})]
    assert told(tmp_path, waiting) == [restart, (*recovery, 1024.0, 5)], "the span ends at the newest record"


def test_files_without_times_or_damaged_ones_cost_their_spans_alone(tmp_path: Path) -> None:
    assert told(tmp_path, []) == []
    file = recoveries_file(tmp_path)
    file.parent.mkdir()
    file.write_bytes(msgspec.json.encode([{"tier": 1, "cause": "c", "at_step": 1, "from_step": 1, "seconds": 2.0}]))
    assert told(tmp_path, steps(1.0)) == [], "files of an older Relax have no times"
    file.write_text("[{")
    spans, problems = event_spans(tmp_path, steps(1.0), [])
    assert spans == []
    assert [problem.split(" cannot")[0] for problem in problems] == ["logs/recoveries.json"]


def test_an_order_has_a_span_for_each_of_its_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("relax_core.server.engine_order_store.time.time", lambda: now[0])
    order_store = EngineOrderStore(tmp_path)
    order = order_store.place("scale_out", {"num_replicas": 3})
    for now[0], state in ((101.0, "CREATING"), (104.0, "READY"), (104.5, "FAILED")):
        order = order_store.move(order, state, engines=[1, 2], failure="it died" if state == "FAILED" else "")  # type: ignore[arg-type]
    now[0] = 110.0
    order_store.place("stop", {})
    with (tmp_path / "events" / "0000.orders.0.jsonl").open("ab") as file:
        file.write(b'{"type":"order","change"')  # an incomplete line
    what = "scale_out engine-1, engine-2"
    expected = [
        ("orders", f"{what}: PENDING", 100.0, 101.0, 0),
        ("orders", f"{what}: CREATING", 101.0, 104.0, 1),
        ("orders", f"{what}: READY", 104.0, 104.5, 2),
        ("orders", f"{what}: FAILED: it died", 104.5, 104.5, 2),
        ("orders", "stop: PENDING", 110.0, 113.0, 2),
    ]
    timed = [*steps(100.5, 103.0), Timed("rollout", 2, 113.0, 0, {"generate": 1.0})]
    assert told(tmp_path, timed) == expected


def test_many_engines_of_an_order_are_counted(tmp_path: Path) -> None:
    order_store = EngineOrderStore(tmp_path)
    order = order_store.place("scale_in", {"num_replicas": 1})
    order_store.move(order, "COMPLETED", engines=list(range(1, 9)))
    *_, last = told(tmp_path, [])
    assert last[1] == "scale_in engine-1, engine-2, engine-3, engine-4 and 4 more: COMPLETED"


def test_the_page_and_the_trace_have_them_in_the_time_of_their_steps(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    reader = RunReader(run_dir, None)
    timed = reader.series().timed
    (last,) = [record for record in timed if record.source == "actor" and record.step == 3]
    row = {
        "tier": 1,
        "cause": "engine-0 died",
        "at_step": 3,
        "from_step": 3,
        "seconds": 0.5,
        "time_s": last.end_s - 0.5,
    }
    recoveries_file(run_dir).write_bytes(msgspec.json.encode([row, row | {"time_s": last.end_s + 60.0}]))
    events, problems = reader.faults_and_orders()
    found = make_timeline(timed, first=None, last=None, events=events)
    assert found is not None and problems == []
    assert [span.name for span in found.spans if span.lane == "restarts"] == ["engine-0 died"]
    reader.close()

    def restarts(*words: str) -> int:
        out = tmp_path / "trace.json"
        out.unlink(missing_ok=True)  # no command overwrites a file
        assert main([str(run_dir), f"--out={out}", *words]) == 0
        return sum(event.get("cat") == "restarts" for event in json.loads(out.read_bytes())["traceEvents"])

    assert [restarts(), restarts("--steps=3:4"), restarts("--steps=3:")] == [2, 1, 2]
