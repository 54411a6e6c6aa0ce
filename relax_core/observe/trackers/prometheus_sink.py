"""Serves the newest value of each metric of a run to Prometheus at ``GET /metrics``."""

from __future__ import annotations

import hmac
import json
import math
import os
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from relax_core.contracts.sink import BaseSink, MetricRecord, Record, SinkConfig, SinkSpec, SinkStart

TOKEN_FILE, ADDRESS_FILE = "prometheus_token", "prometheus.json"  # in the run's folder
SILENT_S = 10.0  # a client is disconnected after this time without data
_INVALID_CHARACTERS = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True)
class PrometheusConfig(SinkConfig):
    """Holds the sink's config keys. ``port`` 0 selects a free port and writes it to the run's ``prometheus.json``."""

    name: str = "prometheus"
    host: str = "127.0.0.1"
    port: int = 0


def check(config: PrometheusConfig) -> None:
    """Raises ValueError for an invalid port."""
    if not 0 <= config.port < 65536:
        raise ValueError(f"tracker.sinks.prometheus.port={config.port}: give a port up to 65535, or 0 for a free port.")


class PrometheusSink(BaseSink):
    """Runs the HTTP server.

    A request needs the header ``Authorization: Bearer TOKEN`` with the token of `TOKEN_FILE`.
    """

    def __init__(self, start: SinkStart, config: PrometheusConfig) -> None:
        token = read_or_make_token(start.run_dir / TOKEN_FILE)
        self._run = start.run_dir.name
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        sink = self

        class Handler(BaseHTTPRequestHandler):
            timeout = SILENT_S

            def do_GET(self) -> None:
                given = self.headers.get("Authorization", "")
                if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                    self.send_error(401, "the token is in the run's folder")
                elif self.path != "/metrics":
                    self.send_error(404)
                else:
                    body = sink.exposition().encode()
                    self.send_response(200)
                    self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                """Writes no log line."""

        self._server = ThreadingHTTPServer((config.host, config.port), Handler)
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        address = {"url": f"http://{config.host}:{port}/metrics", "token_file": TOKEN_FILE}
        (start.run_dir / ADDRESS_FILE).write_text(json.dumps(address), encoding="utf-8")
        threading.Thread(target=self._server.serve_forever, daemon=True, name="prometheus").start()

    def write(self, batch: Sequence[Record]) -> None:
        """Stores the newest value of each metric."""
        with self._lock:
            for record in batch:
                if isinstance(record, MetricRecord):
                    self._values[f"{record.source}/step"] = float(record.step)
                    self._values.update({f"{record.source}/{name}": value for name, value in record.values.items()})

    def exposition(self) -> str:
        """Returns all metrics in Prometheus' text format. Leaves out values that are not finite."""
        with self._lock:
            values = sorted(self._values.items())
        label = json.dumps(self._run, ensure_ascii=False)
        lines = []
        for tag, value in values:
            if math.isfinite(value):
                name = f"relax_{_INVALID_CHARACTERS.sub('_', tag)}"
                lines += [f"# TYPE {name} gauge", f"{name}{{run={label}}} {value!r}"]
        return "\n".join([*lines, ""])

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()


def read_or_make_token(path: Path) -> str:
    """Returns the token in a file. If the file does not exist, creates it with access only for its owner."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text(encoding="utf-8").strip()
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(token)
    return token


SPEC = SinkSpec(
    name="prometheus",
    summary="GET /metrics for Prometheus, with a token",
    config=PrometheusConfig,
    open=PrometheusSink,
    check=check,
)
