"""The timeline of a run and its trace: parts add up to their step, rows do not overlap, who waits for whom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.dashboard.run_series import Timed
from relax_core.dashboard.run_timeline import PARTS_LANE, TRAINER_LANE, all_spans, make_timeline
from relax_core.dashboard.trace_command import main, steps_of, trace_events
from tests.dashboard.made_run import make_run


def actor(step: int, end_s: float, *, resumes: int = 0, **ms: float) -> Timed:
    return Timed("actor", step, end_s, resumes, {"step": 1000.0, "wait": 600.0, "train": 300.0, **ms})


def test_the_parts_of_a_step_add_up_to_it() -> None:
    (span, *parts) = all_spans([actor(0, 11.0, decode=50.0)])
    assert [span.lane, span.start_s, span.end_s] == [TRAINER_LANE, 10.0, 11.0]
    assert [(part.name, round(part.start_s, 6), round(part.end_s, 6)) for part in parts] == [
        *(("wait", 10.0, 10.6), ("decode", 10.6, 10.65)),
        *(("train", 10.65, 10.95), ("other", 10.95, 11.0)),
    ]


def test_the_timeline_of_steps_has_all_that_happened_in_their_time() -> None:
    timed = [
        Timed("rollout", 0, 10.9, 0, {"generate": 700.0, "worker": 1.0}),
        actor(0, 11.0),
        actor(1, 12.0, push=200.0),
        actor(1, 99.0, resumes=1, wait=50.0, push=200.0),
        Timed("eval", 2, 99.0, 1, {}),
        actor(2, 100.0, resumes=1, wait=50.0, push=400.0),
    ]
    found = make_timeline(timed, first=0, last=0)
    assert found is not None
    assert {(span.lane, span.name) for span in found.spans if span.lane != PARTS_LANE} == {
        *(("rollout 1", "batch for weights 0"), ("trainer", "step 0")),
    }
    assert found.told[0].startswith("The trainer waits for samples 60% of its time: generation")
    newest = make_timeline(timed, first=None, last=None, newest=2)
    assert newest is not None
    assert [newest.first, newest.last, newest.start_s] == [1, 2, 98.0]  # step 1 is that after the resume
    assert ("evaluation", 99.0) in {(span.lane, span.end_s) for span in newest.spans}
    (push,) = [span for span in newest.spans if span.lane == "weights" and span.start_s >= 99.0]
    assert [push.name, push.end_s] == ["weights 2 to the engines", pytest.approx(99.4)]
    assert newest.told[0].endswith("it is the slower side.")
    assert sum(newest.shares.values()) == pytest.approx(1.0)
    assert make_timeline([], first=None, last=None) is None
    assert make_timeline(timed, first=7, last=9) is None


def test_the_slices_of_a_trace_are_nested_or_apart() -> None:
    timed = [Timed("rollout", 0, 10.9 + 0.1 * place, 0, {"generate": 700.0}) for place in range(3)]
    timed += [actor(0, 11.0), actor(1, 11.9997)]  # step 1 seems to begin 0.3 ms before step 0 has ended
    events = [event for event in trace_events(all_spans(timed)) if event["ph"] == "X"]
    assert len({event["tid"] for event in events if event["cat"] == "rollout 0"}) == 3
    for row in {event["tid"] for event in events}:
        open_until: list[int] = []
        own = [event for event in events if event["tid"] == row]
        for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)


def test_the_command_writes_the_chosen_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "run")
    out = tmp_path / "trace.json"
    assert main([str(run_dir), "--steps=1:3", f"--out={out}"]) == 0
    names = {event["name"] for event in json.loads(out.read_bytes())["traceEvents"]}
    assert names >= {"step 1", "step 2", "train", "wait"}
    assert not names & {"step 0", "step 3"}
    assert main([str(run_dir), "--steps=9:"]) == 1
    assert main([str(run_dir), "--steps=3"]) == 2
    assert "give A:B with whole numbers" in capsys.readouterr().err
    assert steps_of(":20") == (0, 20.0)
