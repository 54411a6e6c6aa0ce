"""Reads each trace format back with other libraries: the same spans must be in the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.cli.trace_command import main
from relax_core.server.run_events import Timed
from relax_core.server.run_timeline import WRITERS, Span, all_spans, otlp_trace, trace_events
from tests.server.made_run import make_run

START_S = 1_800_000_000.0


def spans() -> list[Span]:
    """Returns two train steps with parts, three batches (two of them overlap), and an event without a duration."""
    timed = [Timed("rollout", 0, START_S + 0.9 + 0.1 * place, 0, {"generate": 700.0}) for place in range(3)]
    parts = {"step": 1000.0, "wait": 600.0, "train": 300.0}
    timed += [Timed("actor", step, START_S + 1.0 + step, 0, parts) for step in range(2)]
    timed += [Timed("eval", 1, START_S + 1.5, 0, {})]
    return all_spans(timed)


def test_the_rows_of_chromes_format_hold_no_overlap() -> None:
    events = trace_events(spans())
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(rows.values()) == {"trainer", "evaluation", "rollout 0", "rollout 0 (2)", "rollout 0 (3)"}
    batches = [event for event in events if event["ph"] == "X" and rows[event["tid"]].startswith("rollout")]
    assert [(batch["ts"], batch["dur"]) for batch in batches] == [
        (200_000 + 100_000 * place, 700_000) for place in range(3)
    ]


def test_the_classes_of_opentelemetry_read_the_spans() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.common")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    def read(run: str) -> Any:
        return ExportTraceServiceRequest.FromString(otlp_trace(spans(), run=run)).resource_spans[0]

    resource = read("demo")
    attributes = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert attributes == {"service.name": "relax", "relax.run": "demo"}
    (scope,) = resource.scope_spans
    whole, *found = scope.spans
    assert (whole.name, whole.start_time_unix_nano, whole.end_time_unix_nano) == (
        *("demo", round(1e9 * START_S)),
        round(1e9 * (START_S + 2.0)),
    )
    assert len(found) == len(spans()) and all(span.kind == 1 for span in scope.spans)
    by_id = {span.span_id: span for span in scope.spans}
    assert len(by_id) == len(scope.spans), "ids are not unique"
    for span in found:
        parent = by_id[span.parent_span_id]
        assert parent.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= parent.end_time_unix_nano
    (waits, _) = [span for span in found if span.name == "wait"]
    assert by_id[waits.parent_span_id].name == "step 0"
    assert waits.end_time_unix_nano - waits.start_time_unix_nano == 600_000_000
    values = {attribute.key: attribute.value for attribute in waits.attributes}
    assert values["relax.lane"].string_value == "trainer's parts" and values["relax.step"].int_value == 0
    assert read("demo") == resource, "a second export has the same ids"
    other_ids = {span.span_id for span in read("other").scope_spans[0].spans}
    assert not other_ids & by_id.keys()


@pytest.mark.parametrize("form", list(WRITERS))
def test_the_command_writes_each_format_under_its_name(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "otlp":
        pytest.importorskip("opentelemetry.exporter.otlp.proto.common")
    run = make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main([str(run), "--format", form]) == 0
    assert (tmp_path / WRITERS[form][0]).stat().st_size > 1000
