"""Tests that SGLang servers join and leave a run under load: servers of the run, and an external server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.sglang.sglang_client import SglangClient
from relax_core.tools.make_tiny import tiny_model_folder
from tests.contracts.engine.harness import SGLANG_PYTHON
from tests.integration.elastic_run import OVERRIDES, ElasticRun
from tests.integration.live_run import LiveRun

pytestmark = [pytest.mark.sglang, pytest.mark.integration]
SGLANG = ("engine=sglang", f"engine.python={SGLANG_PYTHON}")
SERVER = "sglang/sglang_process.py"
KEY = "key-of-the-servers"


def join_and_leave(elastic: ElasticRun, out: dict[str, object], into: dict[str, object], *, left: str) -> None:
    """Orders a new engine, waits for its first group, and orders its removal."""
    began = time.time()
    order = elastic.order("scale_out", out)
    assert order["status"] == "ACTIVE", order
    (engine,) = order["engine_ids"]
    print(f"{engine}: its first group came {elastic.first_group(engine) - began:.1f} s after the order")
    gone = elastic.order("scale_in", into)
    assert gone["status"] == "COMPLETED" and gone["engine_ids"] == [engine], gone
    rows = {row["id"]: row["state"] for row in elastic.ask("GET", "/rollout/engines")["engines"]}
    assert rows[engine] == left, rows


def test_servers_of_the_run_come_and_go(tmp_path: Path) -> None:
    with LiveRun(tmp_path / "run", *OVERRIDES, *SGLANG, "run.save_every=0") as live:
        live.wait_step(2)
        elastic = ElasticRun(live, engine=SERVER)
        join_and_leave(elastic, {"num_replicas": 2}, {"num_replicas": 1}, left="left")
        elastic.wait_alone()
        out = elastic.order("scale_out", {"num_replicas": 2}, victim="newcomer", state="WEIGHT_SYNCING")
        assert out["status"] in ("ACTIVE", "FAILED"), out
        elastic.order("scale_in", {"num_replicas": 1, "force": True})
        elastic.wait_alone()
        step = elastic.ask("GET", "/run")["step"]
        live.wait_step(step + 2)
        run = elastic.stop()
    assert run.summary["logprob_gap"]["max"] < 1e-4


@contextmanager
def server(folder: Path) -> Iterator[EngineProcess]:
    """Yields an external SGLang server, which no run started."""
    (folder / "key").touch(mode=0o600)
    (folder / "key").write_text(KEY)
    process = EngineProcess.start(
        EngineLaunch(
            model_folder=tiny_model_folder("tiny_qwen3", task="reverse_digits"),
            engine=load_config([*SGLANG, "engine.context_length=64"]).engine,
            dtype="float32",
            token_file=folder / "key",
            log_file=folder / "engine.log",
        )
    )
    try:
        yield process
    finally:
        process.stop(timeout_s=10.0)


def test_a_server_of_somebody_elses_joins_and_leaves(tmp_path: Path) -> None:
    """The external server loads copies of the weights. The run's server reads the weights from shared memory."""
    key = f"engine.token_file={tmp_path / 'key'}"
    with server(tmp_path) as foreign, LiveRun(tmp_path / "run", *OVERRIDES, *SGLANG, key, "run.save_every=0") as live:
        live.wait_step(2)
        elastic = ElasticRun(live)
        join_and_leave(elastic, {"engine_urls": [foreign.url]}, {"engine_urls": [foreign.url]}, left="left")
        client = SglangClient(
            foreign.url, KEY, request_timeout_s=30.0, control_timeout_s=30.0, ranks=1, vocab_size=50, seeds=False
        )
        assert client.ready() and client.model_info()["weight_version"] == "-1", "its weights were removed"
        run = elastic.stop()
        assert foreign.poll() is None
    assert run.summary["recoveries"] == [] and run.summary["logprob_gap"]["max"] < 1e-4
    shares = {engine["origin"]: engine["samples"] for engine in run.summary["engines"]}
    assert shares.keys() == {"start", "external"} and all(shares.values()), shares
