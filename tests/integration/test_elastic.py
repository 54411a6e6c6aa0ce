"""Tests that engines join and leave a run by HTTP requests, and that an HTTP request stops the run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.tools.make_tiny import tiny_model_folder
from tests.integration.elastic_run import OVERRIDES, ElasticRun
from tests.integration.embedded_servers import KEY, attached_to, server_command, servers
from tests.integration.live_run import ENGINE, LiveRun
from tests.server.browser import CHROMIUM, opened_browser

pytestmark = pytest.mark.integration


def test_engines_come_and_go_and_nothing_is_lost(tmp_path: Path) -> None:
    """An order sets the number of the run's engines. An external engine joins by its address."""
    command = server_command(tiny_model_folder("tiny_qwen3", task="reverse_digits"), tmp_path)
    key = f"engine.token_file={tmp_path / 'key'}"
    with (
        servers(tmp_path, {"other": command}) as urls,
        LiveRun(tmp_path / "run", *OVERRIDES, key, "run.save_every=0") as live,
    ):
        live.wait_step(1)
        elastic = ElasticRun(live)
        out = elastic.order("scale_out", {"num_replicas": 3})
        assert out["status"] == "ACTIVE" and out["engine_ids"] == ["engine-1", "engine-2"], out
        assert len(elastic.pids(ENGINE)) == 3
        for engine in out["engine_ids"]:
            elastic.first_group(engine)
        order = elastic.order("scale_in", {"num_replicas": 2})
        assert order["status"] == "COMPLETED" and order["engine_ids"] == ["engine-2"], order
        assert len(elastic.pids(ENGINE)) == 2
        forced = elastic.order("scale_in", {"engine_ids": ["engine-1"], "force": True})
        assert forced["status"] == "COMPLETED" and len(elastic.pids(ENGINE)) == 1, forced
        rows = {row["id"]: row["state"] for row in elastic.ask("GET", "/rollout/engines")["engines"]}
        assert rows == {"engine-0": "serving", "engine-1": "left", "engine-2": "left"}
        again = elastic.order("scale_out", {"num_replicas": 2})
        assert again["status"] == "ACTIVE" and again["engine_ids"] == ["engine-3"], again
        if CHROMIUM is not None:
            asyncio.run(order_on_the_page(json.loads((live.folder / "gateway.json").read_text())["page"], tmp_path))
            assert elastic.engines() == ["engine-0", "engine-4"]
        external = elastic.order("scale_out", {"engine_urls": [urls["other"]]})
        assert external["status"] == "ACTIVE", external
        elastic.first_group(*external["engine_ids"])
        copied = sorted(live.folder.glob("relax-*/0/*/model.safetensors"))
        assert copied and not any(path.is_symlink() for path in copied), "it reads a copy of the weights"
        fewer = elastic.order("scale_in", {"engine_urls": [urls["other"]]})
        assert fewer["status"] == "COMPLETED" and weight_version(urls["other"]) == -1, fewer
        run = elastic.stop()
    books = run.summary["ledger"]
    assert set(run.persisted("trained").values()) == {1}
    assert run.summary["outcome"] == "stopped" and run.checkpoints()
    shares = {engine["id"]: engine["samples"] for engine in run.summary["engines"]}
    assert all(shares[f"engine-{number}"] > 0 for number in range(3)), shares
    assert run.summary["engines"][-1]["origin"] == "external" and run.summary["engines"][-1]["samples"] > 0
    assert sum(shares.values()) >= books["trained"], "each sample has one response, which one engine finished"
    assert all(engine["tokens"] >= engine["samples"] for engine in run.summary["engines"])
    assert run.summary["recoveries"] == [], "no change of the engines was a failure"
    assert not (run.folder / "gateway.json").exists() and not list(run.folder.glob("relax-*"))


def weight_version(url: str) -> int:
    """Returns the weight version of a server, or -1 if its weights were removed."""
    client = EngineClient(url, KEY, request_timeout_s=30.0, control_timeout_s=30.0)
    try:
        assert client.ready()
        return int(client.model_info()["weight_version"])
    finally:
        client.close()


def test_the_autoscaler_adds_an_engine_while_the_trainer_waits(tmp_path: Path) -> None:
    slow = ("engine.max_running_samples=16", "engine.elastic.max_count=2", "run.save_every=0")
    scaling = ("engine.autoscaler.enabled=true", "engine.autoscaler.cooldown_s=5")
    with LiveRun(tmp_path / "run", *OVERRIDES, *slow, *scaling) as live:
        live.wait_step(1)
        elastic = ElasticRun(live)
        live.wait_for("a second engine", lambda: elastic.engines() == ["engine-0", "engine-1"])
        elastic.first_group("engine-1")
        (change, *_) = elastic.ask("GET", "/autoscaler/scale_history")["decisions"][::-1]
        assert (change["action"], change["engines"], change["target"]) == ("out", 1, 2)
        assert change["wait_share"] > 0.2 and change["waiting"] > 0 and 0 < change["cache_share"] <= 1, change
        assert f"waits {change['wait_share']:.0%} of its steps' time" in change["reason"]
        rows = elastic.ask("GET", "/rollout/engines")["engines"]
        assert all(row["cache_share"] is not None for row in rows), rows
        assert elastic.ask("POST", "/autoscaler/enable", {"enabled": False}) == {"enabled": False}
        run = elastic.stop()
    (order,) = [operation for operation in run.summary["operations"] if operation["kind"] == "scale_out"]
    assert order["request_id"] == change["request_id"] and order["history"][-1]["state"] == "ACTIVE", order


def test_an_engine_of_somebody_elses_joins_by_its_address_and_forgets_the_weights(tmp_path: Path) -> None:
    command = server_command(tiny_model_folder("tiny_qwen3", task="reverse_digits"), tmp_path)
    with servers(tmp_path, {"first": command, "second": command}) as urls:
        second = urls["second"]
        with LiveRun(tmp_path / "run", *OVERRIDES, *attached_to(urls["first"], tmp_path)) as live:
            live.wait_step(1)
            elastic = ElasticRun(live)
            out = elastic.order("scale_out", {"engine_urls": [second]})
            assert out["status"] == "ACTIVE", out
            elastic.first_group(out["engine_ids"][0])
            gone = elastic.order("scale_in", {"engine_urls": [second]})
            assert gone["status"] == "COMPLETED", gone
            assert weight_version(second) == -1
            run = elastic.stop()
    assert [engine["origin"] for engine in run.summary["engines"]] == ["start", "external"]
    assert all(engine["samples"] for engine in run.summary["engines"])


async def order_on_the_page(link: str, folder: Path) -> None:
    """Uses the buttons of the run's page to remove one of two engines and to add a new engine."""
    async with opened_browser(folder) as page:
        await page.size(1280, 900, dark=False)
        await page.call("Page.navigate", url=link)
        await page.until("document.querySelectorAll('nav a').length > 5 && !location.hash.includes('token')")
        await page.run("[...document.querySelectorAll('nav a')].find(one => one.textContent == 'Engines').click()")
        for button, preview, end in (
            ("fewer", "2 engines would become 1", "COMPLETED"),
            ("more", "would become 2", "ACTIVE"),
        ):
            await page.until(f"document.querySelector('[aria-label=\"one engine {button}\"]')")
            await page.run(f"document.querySelector('[aria-label=\"one engine {button}\"]').click()")
            await page.until(f"document.querySelector('.controls[role=status]').textContent.includes('{preview}')")
            await page.picture(folder / f"{button}.png")
            await page.run("document.querySelector('.controls[role=status] button.main').click()")
            newest = "[...document.querySelectorAll('table')][1]?.querySelector('tbody tr').cells[2].textContent"
            await page.until(f"{newest} == '{end}'")
        assert await page.hurdles() == []
        await page.picture(folder / "engines.png")
        assert page.errors == []
