"""Tests the run's page of the gateway: a link works once; session and run token are not interchangeable."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.control.engine_set import limits_of
from relax_core.control.gateway_process import gateway
from relax_core.control.host.run_paths import run_lock
from relax_core.server.engine_order_service import EngineOrderService, answering
from relax_core.server.engine_order_store import EngineOrderStore
from relax_core.server.gateway_client import FILE, GatewayAddress
from relax_core.server.order_types import RunRow
from tests.control.gateway_harness import look_after, until_up
from tests.observe.test_stall_requests import controller
from tests.server.browser import CHROMIUM, opened_browser
from tests.server.made_run import HOSTILE

DEADLINE_S = 60.0
NO_REPORT = json.dumps({"detail": "the controller did not answer", "fix": "ask again"})


class Reader:
    """A browser at the gateway's address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authorization = ""

    def address(self) -> GatewayAddress:
        return GatewayAddress(**json.loads((self._folder / FILE).read_text()))

    def ask(self, route: str, *, data: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        given = {"Authorization": self.authorization} | headers
        request = urllib.request.Request(self.address().url + route, data=data, headers=given)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def exchange(self, link: str) -> int:
        status, body = self.ask("/api/session", data=link.partition("#token=")[2].encode())
        if status == 200:
            self.authorization = f"Bearer {json.loads(body)['session']}"
        return status


def assert_orders(reader: Reader, *, origin: str) -> None:
    """Asserts that the page may read and order engines only with its session and the right Origin."""
    order = json.dumps({"num_replicas": 1, "dry_run": True}).encode()
    given = {"data": order, "Content-Type": "application/json"}
    route, asked = "/api/gateway/rollout/scale_out", given | {"Origin": origin}
    status, told = reader.ask(route, **asked)
    assert (status, json.loads(told)["type"]) == (503, "urn:relax:problem:run-starts")  # there is no controller here
    assert reader.ask(route, **given)[0] == 403, "a form of another site does not have our Origin"
    for foreign in ("http://elsewhere.example", "null", origin.replace("http:", "https:"), f"{origin}0"):
        assert reader.ask(route, **given, Origin=foreign)[0] == 403, foreign
    assert reader.ask(route, **asked, Host="elsewhere.example")[0] == 403
    assert reader.ask(route, **asked, Authorization="")[0] == 401
    assert reader.ask(route, data=b"num_replicas=1", Origin=origin)[0] == 415, "a form"
    assert reader.ask("/api/gateway/run/stall", **given)[0] == 403, "a form of another site gets no report"
    assert reader.ask("/api/gateway/run/stall", **asked, Authorization="")[0] == 401
    for elsewhere in ("/run", "/run/stall/", "/run/stall2", "/run/stop", "/openapi.json", "/rollout", "/../run", ""):
        assert reader.ask(f"/api/gateway{elsewhere}", data=b"{}", Origin=origin)[0] == 404, elsewhere


def test_a_link_opens_the_page_once_and_the_session_outlives_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = load_config(["gateway=local", "gateway.port=0", f"run.dir={tmp_path / 'run'}"])
    folder = Path(config.run.dir)
    folder.mkdir()
    (folder / "config.yaml").write_text("name: shown\n")
    reader = Reader(folder)
    with gateway(config) as process:
        assert process is not None
        until_up(process)
        first = reader.address()
        assert b"<title>Relax</title>" in reader.ask("/")[1]
        bearer = f"Bearer {first.token}"
        assert reader.ask("/api/runs")[0] == 401
        assert reader.ask("/api/runs", Authorization=bearer)[0] == 401, "the run's token does not open the page"
        assert reader.ask("/", Host="elsewhere.example")[0] == 403
        assert reader.exchange(first.page) == 200
        status, body = reader.ask("/api/runs")
        assert status == 200 and [run["name"] for run in json.loads(body)] == ["run"]
        assert reader.ask("/rollout/engines")[0] == 401, "the session is only valid below the page's address"
        assert_orders(reader, origin=first.url)
        assert reader.ask("/openapi.json", Authorization=bearer)[0] == 200

        second = reader.address()
        assert second.page != first.page and (second.url, second.token) == (first.url, first.token)
        assert Reader(folder).exchange(first.page) == 401 and Reader(folder).exchange(second.page) == 200

        os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while reader.address().pid == second.pid:
            look_after(process)
            assert time.monotonic() < deadline, "it is not started again"
            time.sleep(0.05)
        assert reader.ask("/api/runs")[0] == 200
    output = capsys.readouterr().err
    assert f"page: its link, which works once, is in {folder / FILE}" in output
    assert "#token=" not in output and first.token not in output


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: make dashboard-browser installs it as root")
def test_a_button_asks_what_the_run_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    config = load_config(["gateway=local", "gateway.port=0", f"run.dir={folder}"])
    folder.mkdir()
    (folder / "config.yaml").write_text("name: shown\n")
    with run_lock(folder), gateway(config) as process:
        assert process is not None
        until_up(process)
        order_store = EngineOrderStore(folder)
        order_store.run = RunRow(at=1.0, step=4, steps=9, stopping=False)
        with answering(process.controller_end, EngineOrderService(order_store, limits_of(config), None).answer):
            asyncio.run(press_the_button(folder, tmp_path))
    assert not list((folder / "stall").iterdir())


async def press_the_button(folder: Path, pictures: Path) -> None:
    async with opened_browser(pictures) as page:
        await page.size(1280, 900, dark=False)
        await page.call("Page.navigate", url=json.loads((folder / FILE).read_text())["page"])
        button, shown = (
            "document.querySelector('[aria-label=\"What the run waits for\"] button')",
            "document.body.innerText",
        )
        await page.until(button)
        with controller(folder, f"actor-0 waits for bus {HOSTILE}\n"):
            await page.run(f"{button}.click()")
            await page.until(f"{shown}.includes('actor-0 waits for bus </script>')")
        assert await page.run(f"{shown}.includes('U+202E') && !{button}.disabled")
        assert await page.hurdles() == []
        assert page.errors == []
        await page.picture(pictures / "stall.png")
        await page.run(
            f"globalThis.fetch = () => Promise.resolve(new Response({json.dumps(NO_REPORT)}, {{ status: 503 }}))"
        )
        await page.run(f"{button}.click()")
        await page.until("document.querySelector('.problem')?.innerText.startsWith('the controller did not answer')")
