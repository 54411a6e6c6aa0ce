"""Reads the files of the sinks back with TensorBoard's reader and a plain JSON parser."""

from __future__ import annotations

import json
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator

from relax_core.contracts.sink import Record, SinkStart
from relax_core.observe.event_log import RESUMED, RUN, HistogramRecord, MetricRecord, TextCell, TextRecord
from relax_core.observe.trackers.file_sinks import JsonlSink, TensorBoardSink
from relax_core.observe.trackers.otlp_sink import SPEC as OTLP
from relax_core.observe.trackers.otlp_sink import OtlpConfig, OtlpSink
from relax_core.observe.trackers.prometheus_sink import ADDRESS_FILE, TOKEN_FILE, PrometheusConfig, PrometheusSink

MakeRecord = Callable[..., MetricRecord]


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float, float]]:
    reader = EventAccumulator(str(run_dir / "tensorboard"))
    reader.Reload()
    return [(event.step, event.wall_time, event.value) for event in reader.Scalars(tag)]


def histogram_of(name: str) -> HistogramRecord:
    return HistogramRecord(
        source="actor",
        step=3,
        time_s=1003.0,
        name=name,
        limits=[4.0, 8.0],
        counts=[3, 1],
        least=2.0,
        largest=8.0,
        total=17.0,
        total_of_squares=93.0,
    )


def test_tensorboard_reads_its_own_event_file(tmp_path: Path, make_record: MakeRecord) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(
        [make_record("actor", 0, reward=0.5, **{"algorithm/clip_share": 0.25}), make_record("eval", 0, exact=0.0)]
    )
    sink.write([TextRecord(kind="eval", step=0, time_s=0.0, rows=[])])
    sink.write([make_record("actor", 1, reward=0.75)])
    sink.close()
    assert scalars(tmp_path, "actor/reward") == [(0, 1000.0, 0.5), (1, 1001.0, 0.75)]
    assert scalars(tmp_path, "actor/algorithm/clip_share") == [(0, 1000.0, 0.25)]
    assert scalars(tmp_path, "eval/exact") == [(0, 1000.0, 0.0)]


def test_tensorboard_reads_the_histogram_and_json_lines_leave_it_out(tmp_path: Path) -> None:
    histogram = histogram_of("response_tokens")
    for sink in (TensorBoardSink(tmp_path), JsonlSink(tmp_path)):
        sink.write([histogram])
        sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    (event,) = reader.Histograms("actor/response_tokens/distribution")
    assert (event.step, event.wall_time) == (3, 1003.0)
    found = event.histogram_value
    assert (found.min, found.max, found.num, found.sum, found.sum_squares) == (2.0, 8.0, 4.0, 17.0, 93.0)
    assert (list(found.bucket_limit), list(found.bucket)) == ([4.0, 8.0], [3.0, 1.0])


def test_each_dashboard_of_tensorboard_has_its_own_tags(tmp_path: Path, make_record: MakeRecord) -> None:
    """TensorBoard takes a tag's type from its first event, so numbers, histograms and texts must not share a tag."""
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    sink = TensorBoardSink(tmp_path)
    rows: list[dict[str, TextCell]] = [{"prompt": "<b>p</b>", "exact": True}, {"prompt": "q\n# r", "exact": False}]
    sink.write(
        [
            make_record("actor", 0, response_tokens=3.0),
            histogram_of("response_tokens"),
            TextRecord(kind="eval", step=0, time_s=1.0, rows=rows),
        ]
    )
    sink.close()
    reader = PluginEventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    tags = {plugin: set(reader.PluginTagToContent(plugin)) for plugin in ("scalars", "histograms", "text")}
    assert tags == {
        "scalars": {"actor/response_tokens"},
        "histograms": {"actor/response_tokens/distribution"},
        "text": {"config", "eval/texts"},
    }
    (event,) = reader.Tensors("eval/texts")
    (text,) = event.tensor_proto.string_val
    assert text.decode().split("\n\n") == [
        *("**prompt**", "    <b>p</b>", "**exact**", "    True", "---"),
        *("**prompt**", "    q\n    # r", "**exact**", "    False"),
    ]


def test_tensorboard_hides_the_steps_that_a_resume_undid(tmp_path: Path, make_record: MakeRecord) -> None:
    first = TensorBoardSink(tmp_path)
    first.write([make_record("actor", step, reward=0.0) for step in range(6)])
    first.close()
    second = TensorBoardSink(tmp_path)
    second.write([make_record(RUN, 4, **{RESUMED: 1.0}), make_record("actor", 4, reward=1.0)])
    second.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert [(step, value) for step, _, value in scalars(tmp_path, "actor/reward")] == [
        (0, 0.0),
        (1, 0.0),
        (2, 0.0),
        (3, 0.0),
        (4, 1.0),
    ]


def test_json_lines_are_plain_json_with_null_for_nan(tmp_path: Path, make_record: MakeRecord) -> None:
    sink = JsonlSink(tmp_path)
    sink.write([make_record("actor", 7, loss=float("nan"), reward=0.5)])
    sink.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "type": "numbers",
        "source": "actor",
        "step": 7,
        "time_s": 1007.0,
        "values": {"loss": None, "reward": 0.5},
    }
    assert not (tmp_path / "texts.jsonl").exists()


def test_a_line_that_a_killed_process_left_unfinished_is_cut_off(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(tmp_path)
    first.write([make_record("actor", 0, reward=0.5)])
    first.close()
    with path.open("a") as file:
        file.write('{"source":"actor","st' + "e" * 200_000)
    second = JsonlSink(tmp_path)
    second.write([make_record("actor", 1, reward=0.75)])
    second.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]
    assert path.stat().st_size < 1_000


T = 60.0
BATCH: list[Record] = [
    MetricRecord(
        source="actor", step=3, time_s=1.5, values={"reward": 0.25, "train/forward": 2.0, "gap": float("nan")}
    ),
    MetricRecord(source="actor", step=4, time_s=2.5, values={"reward": 0.5}),
]


def test_prometheus_gets_the_newest_values_with_the_token_alone(tmp_path: Path) -> None:
    sink = PrometheusSink(SinkStart(run_dir=tmp_path), PrometheusConfig())
    try:
        sink.write(BATCH)
        url = json.loads((tmp_path / ADDRESS_FILE).read_text())["url"]
        token = (tmp_path / TOKEN_FILE).read_text()
        assert stat.S_IMODE((tmp_path / TOKEN_FILE).stat().st_mode) == 0o600
        for header in ("", f"Bearer {token}x"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": header}), timeout=T)
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=T) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        sink.close()
    label = f'{{run="{tmp_path.name}"}}'
    assert f"relax_actor_reward{label} 0.5" in lines
    assert f"relax_actor_train_forward{label} 2.0" in lines
    assert f"relax_actor_step{label} 4.0" in lines
    assert "# TYPE relax_actor_reward gauge" in lines
    assert not any("gap" in line for line in lines)


class Collector(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.bodies = 200, list[tuple[str | None, Any]]()


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append((self.headers.get("x-key"), body))
        self.send_response(self.server.status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None: ...


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(T)


def test_a_collector_gets_gauges_and_a_refusal_is_raised(collector: Collector, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as service

    headers = tmp_path / "headers.json"
    headers.write_text('{"x-key": "secret"}')
    headers.chmod(0o600)
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}/v1/metrics"
    config = OtlpConfig(endpoint=endpoint, headers_file=str(headers))
    OTLP.check(config)
    sink = OtlpSink(SinkStart(run_dir=tmp_path), config)
    sink.write(BATCH)
    ((key, body),) = collector.bodies
    assert key == "secret"
    (resource,) = service.ExportMetricsServiceRequest.FromString(body).resource_metrics
    (scope,) = resource.scope_metrics
    points = {metric.name: metric.gauge.data_points for metric in scope.metrics}
    assert points.keys() == {"relax.actor.reward", "relax.actor.train.forward"}
    assert [point.as_double for point in points["relax.actor.reward"]] == [0.25, 0.5]
    newest = points["relax.actor.reward"][1]
    assert newest.time_unix_nano == 2_500_000_000
    assert [(attribute.key, attribute.value.int_value) for attribute in newest.attributes] == [("step", 4)]
    for collector.status in (503, 302):  # following a redirect would send the headers to another address
        with pytest.raises(RuntimeError, match=f"answers {collector.status}"):
            sink.write(BATCH)
    assert len(collector.bodies) == 3
    sink.close()


def test_headers_that_others_may_read_are_refused(tmp_path: Path) -> None:
    headers = tmp_path / "headers.json"
    headers.write_text("[]")
    headers.chmod(0o644)
    with pytest.raises(ValueError, match="other users may read it"):
        OTLP.check(OtlpConfig(headers_file=str(headers)))
    headers.chmod(0o600)
    with pytest.raises(ValueError, match="give a JSON object"):
        OTLP.check(OtlpConfig(headers_file=str(headers)))
    with pytest.raises(ValueError, match="endpoint=localhost"):
        OTLP.check(OtlpConfig(endpoint="localhost"))
