"""Each format of a trace is read back by somebody else's reader, and has the same spans in the same rows."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from relax_core.cli.trace_command import main
from relax_core.server.run_series import Timed
from relax_core.server.timeline.run_timeline import all_spans
from relax_core.server.timeline.timeline_spans import Span
from relax_core.server.timeline.trace_formats import WRITERS, otlp_trace, perfetto_trace, trace_events
from tests.server.made_run import make_run

START_S = 1_800_000_000.0


def spans() -> list[Span]:
    """Two train steps with their parts, three batches of which two overlap, and something without a length."""
    timed = [Timed("rollout", 0, START_S + 0.9 + 0.1 * place, 0, {"generate": 700.0}) for place in range(3)]
    parts = {"step": 1000.0, "wait": 600.0, "train": 300.0}
    timed += [Timed("actor", step, START_S + 1.0 + step, 0, parts) for step in range(2)]
    timed += [Timed("eval", 1, START_S + 1.5, 0, {})]
    return all_spans(timed)


def slices(trace: bytes) -> list[tuple[str, str, int, int, dict[str, float]]]:
    """Row, name, begin and end in ns, and annotations of each slice, as Perfetto's own classes read them."""
    messages = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="make test-env")
    rows: dict[int, str] = {}
    names: dict[tuple[str, int], str] = {}
    found: list[tuple[str, str, int, int, dict[str, float]]] = []
    begun: dict[int, list[tuple[str, int, dict[str, float]]]] = {}
    for packet in messages.Trace.FromString(trace).packet:
        if packet.HasField("track_descriptor"):
            rows[packet.track_descriptor.uuid] = packet.track_descriptor.thread.thread_name
        for kind in ("event_names", "event_categories", "debug_annotation_names"):
            names |= {(kind, one.iid): one.name for one in getattr(packet.interned_data, kind)}
        if not packet.HasField("track_event"):
            continue
        event, at = packet.track_event, packet.timestamp
        if event.type == messages.TrackEvent.TYPE_SLICE_END:
            name, start, values = begun[event.track_uuid].pop()
            found.append((rows[event.track_uuid], name, start, at, values))
            continue
        values = {
            names["debug_annotation_names", one.name_iid]: getattr(one, one.WhichOneof("value"))
            for one in event.debug_annotations
        }
        name = names["event_names", event.name_iid]
        if event.type == messages.TrackEvent.TYPE_INSTANT:
            found.append((rows[event.track_uuid], name, at, at, values))
        else:
            begun.setdefault(event.track_uuid, []).append((name, at, values))
    assert not any(begun.values()), "each slice that begins ends"
    return found


def test_perfettos_classes_read_what_chromes_format_has() -> None:
    events = trace_events(spans())
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    expected = [
        (rows[one["tid"]], one["name"], 1000 * one["ts"], 1000 * (one["ts"] + one.get("dur", 0)), one["args"])
        for one in events
        if one["ph"] in "Xi"
    ]
    found = slices(perfetto_trace(spans(), run="demo"))
    assert {row for row, *_ in found} == {"trainer", "evaluation", "rollout 0", "rollout 0 (2)", "rollout 0 (3)"}
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_the_classes_of_opentelemetry_read_the_spans() -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    from google.protobuf.json_format import Parse

    trace = otlp_trace(spans(), run="demo")
    (resource,) = Parse(trace, service.ExportTraceServiceRequest()).resource_spans
    attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert attributes == {"service.name": "relax", "relax.run": "demo"}
    (scope,) = resource.scope_spans
    whole, *found = scope.spans
    assert (whole.name, whole.start_time_unix_nano, whole.end_time_unix_nano) == (
        *("demo", round(1e9 * START_S)),
        round(1e9 * (START_S + 2.0)),
    )
    assert len(found) == len(spans()) and all(one.kind == 1 for one in scope.spans)
    by_id = {one.span_id: one for one in scope.spans}
    assert len(by_id) == len(scope.spans), "ids differ"
    for one in found:
        parent = by_id[one.parent_span_id]
        assert parent.start_time_unix_nano <= one.start_time_unix_nano
        assert one.start_time_unix_nano <= one.end_time_unix_nano <= parent.end_time_unix_nano
    (waits, _) = [one for one in found if one.name == "wait"]
    assert by_id[waits.parent_span_id].name == "step 0"
    assert waits.end_time_unix_nano - waits.start_time_unix_nano == 600_000_000
    values = {one.key: one.value for one in waits.attributes}
    assert values["relax.lane"].string_value == "trainer's parts" and values["relax.step"].int_value == 0
    # OTLP writes ids as hexadecimal digits where protobuf's own JSON has base64, so its parser reads other bytes.
    for one, read in zip(json.loads(trace)["resourceSpans"][0]["scopeSpans"][0]["spans"], scope.spans, strict=True):
        assert len(bytes.fromhex(one["traceId"])) == 16 and len(bytes.fromhex(one["spanId"])) == 8
        assert base64.b64encode(read.span_id).decode() == one["spanId"]
        assert isinstance(one["startTimeUnixNano"], str) and isinstance(one["endTimeUnixNano"], str)


def test_the_same_run_gets_the_same_ids_and_another_one_gets_others() -> None:
    def ids(run: str) -> list[Any]:
        (scope,) = json.loads(otlp_trace(spans(), run=run))["resourceSpans"][0]["scopeSpans"]
        return [(one["traceId"], one["spanId"]) for one in scope["spans"]]

    assert ids("demo") == ids("demo")
    assert not {*ids("demo")} & {*ids("other")}


@pytest.mark.parametrize("form", list(WRITERS))
def test_the_command_writes_each_format_under_its_name(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "perfetto":
        pytest.importorskip("perfetto", reason="make test-env")
    run = make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main([str(run), "--format", form]) == 0
    assert (tmp_path / WRITERS[form][0]).stat().st_size > 1000


def test_a_missing_package_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "trace"
    assert main([str(make_run(tmp_path / "run")), "--format=perfetto", f"--out={out}"]) == 2
    told = "relax trace: --format=perfetto needs the package perfetto: pip install 'relax-core[perfetto]'.\n"
    assert capsys.readouterr().err == told
    assert not out.exists()
