"""Sends a run's numbers to an OpenTelemetry collector as OTLP over HTTP with JSON bodies, which needs no library."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.contracts.host_network import opener, proxy_words
from relax_core.contracts.sink import BaseSink, MetricRecord, Record, SinkConfig, SinkSpec, SinkStart

SERVICE = "relax"


@dataclass(frozen=True)
class OtlpConfig(SinkConfig):
    """Holds the keys of the sink.

    ``headers_file`` is a JSON file with further headers, such as a key of the collector; its owner alone may read it.
    """

    name: str = "otlp"
    endpoint: str = "http://127.0.0.1:4318/v1/metrics"
    headers_file: str | None = None
    timeout_s: float = 10.0


def check(config: OtlpConfig) -> None:
    """Raises ValueError for an address or a file of headers that cannot be used."""
    key = "tracker.sinks.otlp"
    if not config.endpoint.startswith(("http://", "https://")):
        raise ValueError(f"{key}.endpoint={config.endpoint}: give http(s)://HOST:4318/v1/metrics.")
    if config.timeout_s <= 0:
        raise ValueError(f"{key}.timeout_s={config.timeout_s}: give seconds above 0.")
    if config.headers_file is not None:
        path = Path(config.headers_file).expanduser()
        if not path.is_file():
            raise ValueError(f"{key}.headers_file={config.headers_file}: there is no such file.")
        if path.stat().st_mode & 0o077:
            raise ValueError(f"{key}.headers_file={config.headers_file}: others may read it. chmod 600 it.")
        _headers(path)


def _headers(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"tracker.sinks.otlp.headers_file={path}: it is no JSON object: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"tracker.sinks.otlp.headers_file={path}: give a JSON object of texts.")
    return found


class OtlpSink(BaseSink):
    """Sends each batch as gauges ``relax.SOURCE.NAME`` with the step as an attribute."""

    def __init__(self, start: SinkStart, config: OtlpConfig) -> None:
        self._config = config
        own = {} if config.headers_file is None else _headers(Path(config.headers_file).expanduser())
        self._headers = {**own, "Content-Type": "application/json"}
        self._opener = opener(config.endpoint)  # the headers are for this address
        self._where = f"{config.endpoint}{proxy_words(config.endpoint)}"
        self._resource = {"attributes": [_text("service.name", SERVICE), _text("relax.run", start.run_dir.name)]}

    def write(self, batch: Sequence[Record]) -> None:
        """Sends the numbers of a batch in one request. Raises RuntimeError if the collector refuses them."""
        points: dict[str, list[dict[str, Any]]] = {}
        for record in batch:
            if isinstance(record, MetricRecord):
                for name, value in record.values.items():
                    if math.isfinite(value):
                        point = {
                            "timeUnixNano": str(round(1e9 * record.time_s)),
                            "asDouble": value,
                            "attributes": [{"key": "step", "value": {"intValue": str(record.step)}}],
                        }
                        points.setdefault(f"{SERVICE}.{record.source}.{name.replace('/', '.')}", []).append(point)
        if not points:
            return
        metrics = [{"name": name, "gauge": {"dataPoints": own}} for name, own in points.items()]
        scope = {"scope": {"name": SERVICE}, "metrics": metrics}
        body = json.dumps({"resourceMetrics": [{"resource": self._resource, "scopeMetrics": [scope]}]}).encode()
        request = urllib.request.Request(self._config.endpoint, data=body, headers=self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._config.timeout_s) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{self._where} answers {error.code}") from error
        except urllib.error.URLError as error:
            raise RuntimeError(f"{self._where} does not answer: {error.reason}") from error


def _text(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}


SPEC = SinkSpec(
    name="otlp",
    summary="an OpenTelemetry collector, as OTLP over HTTP",
    config=OtlpConfig,
    open=OtlpSink,
    check=check,
)
