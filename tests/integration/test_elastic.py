"""Engines are added to a run and taken out of it over HTTP while it trains, and then it is stopped the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.bus.ledger.ledger_reader import LedgerFile
from relax_core.gateway.gateway_client import GatewayClient
from tests.integration.live_run import ENGINE, LiveRun

pytestmark = pytest.mark.integration

OVERRIDES = (
    "gateway=local",
    "gateway.port=0",
    "run.steps=100000",
    "engine.max_running_samples=16",  # one engine is slower than training, so all of them get prompts
    "eval.every=0",
    "run.save_every=0",
    "run.export_hf=false",
)


def ask(folder: Path, method: str, route: str, **body: Any) -> Any:
    """Returns the answer of the run's gateway."""
    return GatewayClient(folder).ask(method, route, body or None)


def wait_order(live: LiveRun, way: str, order: dict[str, Any], status: str) -> dict[str, Any]:
    newest: dict[str, Any] = {}

    def reached() -> bool:
        newest.update(ask(live.folder, "GET", f"/rollout/{way}/{order['request_id']}"))
        assert newest["status"] == status or newest["status"] not in ("FAILED", "CANCELLED"), newest
        return bool(newest["status"] == status)

    live.wait_for(f"{way} to be {status}", reached)
    return newest


def engines_of(live: LiveRun) -> int:
    return sum(ENGINE in line for line in live.processes().values())


def test_engines_come_and_go_and_nothing_is_lost(tmp_path: Path) -> None:
    with LiveRun(tmp_path / "run", *OVERRIDES) as live:
        live.wait_step(1)
        folder = live.folder
        out = wait_order(live, "scale_out", ask(folder, "POST", "/rollout/scale_out", num_replicas=3), "ACTIVE")
        assert out["engine_ids"] == ["engine-1", "engine-2"] and engines_of(live) == 3

        def sampled(engine: str) -> bool:
            with LedgerFile(folder / "ledger.sqlite") as file:
                newest = file.samples({"step": int(ask(folder, "GET", "/run")["step"]) - 2})
            made = [event.made for life in newest for event in life.events if event.made is not None]
            return any(turn.engine == engine for one in made for turn in one.turns)

        for engine in ("engine-1", "engine-2"):
            live.wait_for(f"samples of {engine}", lambda engine=engine: sampled(engine))  # type: ignore[misc]
        one = wait_order(live, "scale_in", ask(folder, "POST", "/rollout/scale_in", num_replicas=2), "COMPLETED")
        assert one["engine_ids"] == ["engine-2"] and engines_of(live) == 2
        body = {"engine_ids": ["engine-1"], "force": True}
        wait_order(live, "scale_in", ask(folder, "POST", "/rollout/scale_in", **body), "COMPLETED")
        assert engines_of(live) == 1
        rows = {row["id"]: row["state"] for row in ask(folder, "GET", "/rollout/engines")["engines"]}
        assert rows == {"engine-0": "serving", "engine-1": "left", "engine-2": "left"}
        again = ask(folder, "POST", "/rollout/scale_out", num_replicas=2)
        assert wait_order(live, "scale_out", again, "ACTIVE")["engine_ids"] == ["engine-3"]
        assert ask(folder, "POST", "/run/stop")["kind"] == "stop"
        run = live.finish()
    assert run.code == 128 + 15, run.output
    books = run.summary["ledger"]
    assert books["lost"] == books["trained_twice"] == 0, books
    assert books["issued"] == books["trained"] + books["open"] + sum(books["dropped"].values()), books
    assert set(run.persisted("trained").values()) == {1}
    assert run.summary["outcome"] == "stopped" and run.checkpoints()
    assert run.summary["recoveries"] == [], "no change of the engines was a failure"
    assert not (run.folder / "gateway.json").exists()
