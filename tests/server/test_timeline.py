"""Tests a run's timeline and trace: the parts of a step add up to the step, rows do not overlap, waits have a cause."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from relax_core.cli.trace_command import main, steps_of
from relax_core.server import run_timeline
from relax_core.server.run_events import Timed
from relax_core.server.run_timeline import (
    BETWEEN_CALLS,
    PARTS_LANE,
    TRAINER_LANE,
    all_spans,
    make_timeline,
    trace_events,
)
from tests.server.made_run import make_run


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
    assert [newest.first, newest.last, newest.start_s] == [1, 2, 98.0]  # step 1 is from after the resume
    assert ("evaluation", 99.0) in {(span.lane, span.end_s) for span in newest.spans}
    (push,) = [span for span in newest.spans if span.lane == "weights" and span.start_s >= 99.0]
    assert [push.name, push.end_s] == ["weights 2 to the engines", pytest.approx(99.4)]
    assert newest.told[0].endswith("it is the slower side.")
    assert sum(newest.shares.values()) == pytest.approx(1.0)
    assert make_timeline([], first=None, last=None) is None
    assert make_timeline(timed, first=7, last=9) is None


RANK_MS = {"step": 400.0, "lag": 50.0, "pack": 10.0, "forward": 100.0, "sums": 5.0, "reduce": 20.0, "optimizer": 15.0}


def ranks(step: int, end_s: float, **parts: float) -> Timed:
    """Returns the record of two ranks. The second rank has half of the work."""
    own = {"backward": 200.0, "cpu/forward": 90.0, **RANK_MS, **parts}
    values = {f"actor-0/{name}": ms for name, ms in own.items()}
    return Timed("rank", step, end_s, 0, values | {f"actor-1/{name}": 0.5 * ms for name, ms in own.items()})


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, {"pack": 10.0, "forward": 100.0, "sums": 5.0, "backward": 200.0, BETWEEN_CALLS: 50.0}),
        (
            {"backward": 0.0, "pipeline": 300.0},
            {"pack": 10.0, "forward": 100.0, "pipeline": 190.0, "sums": 5.0, BETWEEN_CALLS: 60.0},
        ),
    ],
)
def test_the_parts_of_a_rank_add_up_to_its_step(parts: dict[str, float], expected: dict[str, float]) -> None:
    spans = all_spans([ranks(3, 100.0, **parts)])
    for lane, share, began, ended in (("actor-0", 1.0, 99.55, 99.95), ("actor-1", 0.5, 99.775, 99.975)):
        own = [span for span in spans if span.lane == lane]
        assert (own[0].start_s, own[-1].end_s) == (pytest.approx(began), pytest.approx(ended))
        assert all(before.end_s == after.start_s for before, after in pairwise(own))
        took = {span.name: 1e3 * (span.end_s - span.start_s) for span in own}
        expected_ms = {name: share * ms for name, ms in ({"reduce": 20.0, "optimizer": 15.0} | expected).items()}
        assert took == pytest.approx(expected_ms, abs=0.01)
        assert next(span for span in own if span.name == "forward").values == {"cpu_ms": share * 90.0}


def test_engines_have_spans_of_the_requests_that_a_record_tells() -> None:
    engine = {"engine/engine-1/span": 300.0, "engine/engine-1/lag": 100.0, "engine/engine-1/samples": 64.0}
    spans = all_spans([Timed("rollout", 7, 10.0, 0, {"generate": 500.0, **engine})])
    batch, requests = spans
    assert (batch.lane, batch.values) == ("rollout 0", {"generate": 500.0})
    assert (requests.lane, requests.name, requests.step) == ("engine-1", "requests of batch 7", 7)
    assert (requests.start_s, requests.end_s) == (pytest.approx(9.6), pytest.approx(9.9))
    assert requests.values == {"requests": 0.0, "samples": 64.0}


def test_a_timeline_has_the_ranks_near_it_and_leaves_out_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = [record for step in range(5) for record in (actor(step, 11.0 + step), ranks(step, 11.0 + step))]
    found = make_timeline(timed, first=2, last=3)
    assert found is not None
    assert {(span.lane, span.step) for span in found.spans if span.of_rank} == {
        *(("actor-0", 2), ("actor-1", 2), ("actor-0", 3), ("actor-1", 3)),
    }
    monkeypatch.setattr(run_timeline, "MAX_RANK_SPANS", 10)
    fewer = make_timeline(timed, first=2, last=3)
    assert fewer is not None and not any(span.of_rank for span in fewer.spans)


def test_the_slices_of_a_trace_are_nested_or_apart() -> None:
    timed = [Timed("rollout", 0, 10.9 + 0.1 * place, 0, {"generate": 700.0}) for place in range(3)]
    timed += [ranks(0, 11.0), ranks(1, 11.3)]  # by the records, the second step begins before the first has ended
    timed += [actor(0, 11.0), actor(1, 11.9997)]  # by the records, step 1 begins 0.3 ms before the end of step 0
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
