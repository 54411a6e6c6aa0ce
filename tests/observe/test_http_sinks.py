"""Prometheus and OpenTelemetry: what they get, who may ask, and an answer that refuses."""

from __future__ import annotations

import json
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.sink import MetricRecord, Record, SinkStart
from relax_core.observe.trackers.otlp_sink import SPEC as OTLP
from relax_core.observe.trackers.otlp_sink import OtlpConfig, OtlpSink
from relax_core.observe.trackers.prometheus_sink import ADDRESS_FILE, TOKEN_FILE, PrometheusConfig, PrometheusSink

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
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.headers.get("x-key"), body))
        self.send_response(self.server.status)
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
    (scope,) = body["resourceMetrics"][0]["scopeMetrics"]
    points = {one["name"]: one["gauge"]["dataPoints"] for one in scope["metrics"]}
    assert points.keys() == {"relax.actor.reward", "relax.actor.train.forward"}
    assert [point["asDouble"] for point in points["relax.actor.reward"]] == [0.25, 0.5]
    assert points["relax.actor.reward"][1]["timeUnixNano"] == "2500000000"
    assert points["relax.actor.reward"][1]["attributes"] == [{"key": "step", "value": {"intValue": "4"}}]
    collector.status = 503
    with pytest.raises(RuntimeError, match="answers 503"):
        sink.write(BATCH)


def test_headers_that_others_may_read_are_refused(tmp_path: Path) -> None:
    headers = tmp_path / "headers.json"
    headers.write_text("[]")
    headers.chmod(0o644)
    with pytest.raises(ValueError, match="others may read it"):
        OTLP.check(OtlpConfig(headers_file=str(headers)))
    headers.chmod(0o600)
    with pytest.raises(ValueError, match="give a JSON object"):
        OTLP.check(OtlpConfig(headers_file=str(headers)))
    with pytest.raises(ValueError, match="endpoint=localhost"):
        OTLP.check(OtlpConfig(endpoint="localhost"))
