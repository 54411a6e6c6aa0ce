"""Sends a run's metrics to an OpenTelemetry collector as OTLP over HTTP, with OpenTelemetry's own client."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.contracts.host_network import is_loopback_url, proxy_description
from relax_core.contracts.sink import BaseSink, MetricRecord, Record, SinkConfig, SinkSpec, SinkStart

if TYPE_CHECKING:
    import requests

SERVICE = "relax"
CLIENT = "opentelemetry-exporter-otlp-proto-http"


@dataclass(frozen=True)
class OtlpConfig(SinkConfig):
    """Holds the sink's config keys.

    ``headers_file`` is a JSON file with further headers, such as an API key. Only the file's owner may have read
    access.
    """

    name: str = "otlp"
    endpoint: str = "http://127.0.0.1:4318/v1/metrics"
    headers_file: str | None = None
    timeout_s: float = 10.0


def check(config: OtlpConfig) -> None:
    """Raises ValueError if the client is missing, or if the endpoint, the timeout or the headers file is invalid."""
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
            raise ValueError(f"{key}.headers_file={config.headers_file}: other users may read it. chmod 600 it.")
        _headers(path)
    try:
        distribution(CLIENT)
    except PackageNotFoundError:
        raise ValueError(f"{key} needs the package {CLIENT}: pip install 'relax-core[otlp]'.") from None


def _headers(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"tracker.sinks.otlp.headers_file={path}: it is not a JSON object: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"tracker.sinks.otlp.headers_file={path}: give a JSON object of texts.")
    return found


class OtlpSink(BaseSink):
    """Sends each batch as gauges ``relax.SOURCE.NAME`` with the step as an attribute."""

    def __init__(self, start: SinkStart, config: OtlpConfig) -> None:
        import requests
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        session = requests.Session()
        session.trust_env = not is_loopback_url(config.endpoint)  # no proxy for loopback addresses
        session.hooks["response"] = [self._refuse]
        self._exporter: Any = OTLPMetricExporter(
            endpoint=config.endpoint,
            headers=None if config.headers_file is None else _headers(Path(config.headers_file).expanduser()),
            timeout=config.timeout_s,
            session=session,
        )
        self._where, self._timeout_s = f"{config.endpoint}{proxy_description(config.endpoint)}", config.timeout_s
        self._answer = ""
        self._run = start.run_dir.name

    def _refuse(self, response: requests.Response, *_: object, **__: object) -> None:
        """Raises HTTPError for a status other than 2xx.

        The client itself would take 3xx for success and wait after a 503.
        """
        from requests import HTTPError

        if not 200 <= response.status_code < 300:
            self._answer = f"answers {response.status_code}"
            raise HTTPError(self._answer)

    def write(self, batch: Sequence[Record]) -> None:
        """Sends the metrics of a batch in one request. Raises RuntimeError if the collector does not accept them."""
        from opentelemetry.sdk.metrics import export
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        points: dict[str, list[Any]] = {}
        for record in batch:
            if isinstance(record, MetricRecord):
                time_ns, step = round(1e9 * record.time_s), {"step": record.step}
                for name, value in record.values.items():
                    if math.isfinite(value):
                        own = points.setdefault(f"{SERVICE}.{record.source}.{name.replace('/', '.')}", [])
                        own.append(export.NumberDataPoint(step, 0, time_ns, value))
        if not points:
            return
        metrics = [export.Metric(name, "", "", export.Gauge(own)) for name, own in points.items()]
        scope = export.ScopeMetrics(InstrumentationScope(SERVICE), metrics, "")
        resource = Resource({"service.name": SERVICE, "relax.run": self._run})
        self._answer = f"gave no answer within {self._timeout_s:g} s"
        sent = self._exporter.export(export.MetricsData([export.ResourceMetrics(resource, [scope], "")]))
        if sent is not export.MetricExportResult.SUCCESS:
            raise RuntimeError(f"{self._where} {self._answer}; the log of this tracker says more")

    def close(self) -> None:
        """Closes the connection."""
        self._exporter.shutdown()


SPEC = SinkSpec(
    name="otlp",
    summary="an OpenTelemetry collector, as OTLP over HTTP",
    config=OtlpConfig,
    open=OtlpSink,
    check=check,
)
