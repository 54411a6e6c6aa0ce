"""Drives a headless Chromium through its DevTools protocol, and records console errors and requests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import axe_core_python

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
AXE = Path(axe_core_python.__file__).with_name("axe.min.js")
DEADLINE_S = 300.0  # a loaded machine needs tens of seconds to start the browser
# Only the name of loopback resolves, and the browser sends no background requests.
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-port=0"),
)


class Page:
    """Drives one tab. ``errors``: console errors and uncaught exceptions. ``requests``: all requested addresses."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._read = asyncio.create_task(self._receive())
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def _receive(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
                continue
            values = told["params"]
            match told["method"]:
                case "Runtime.exceptionThrown":
                    self.errors.append(json.dumps(values["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if values["type"] in ("error", "warning", "assert"):
                    self.errors.append(json.dumps(values["args"]))
                case "Log.entryAdded" if values["entry"]["level"] in ("error", "warning"):
                    self.errors.append(json.dumps(values["entry"]))
                case "Network.requestWillBeSent":
                    self.requests.append(values["request"]["url"])

    async def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Calls a method of the DevTools protocol and returns the result."""
        self._number += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        await self._socket.send_json({"id": self._number, "method": method, "params": values})
        async with asyncio.timeout(DEADLINE_S):
            told = await answer
        assert "error" not in told, told
        return told["result"]

    async def run(self, code: str) -> Any:
        """Runs JavaScript in the page like after a user's click, and returns its value."""
        told = await self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, condition: str) -> None:
        """Blocks until a JavaScript expression is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not await self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, (
                f"{condition}; the page shows {await self.run('document.body.innerText')}"
            )
            await asyncio.sleep(0.1)

    async def hurdles(self) -> list[str]:
        """Returns axe-core's serious and critical accessibility violations with their elements."""
        if not await self.run("'axe' in window"):
            await self.run(AXE.read_text(encoding="utf-8"))
        found = await self.run("axe.run().then(found => found.violations)")
        return [
            f"{violation['id']}: {violation['help']}: {[node['target'] for node in violation['nodes']]}"
            for violation in found
            if violation["impact"] in ("serious", "critical")
        ]

    async def size(self, width: int, height: int, *, dark: bool) -> None:
        """Sets the window's size and the colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def picture(self, path: Path) -> None:
        """Writes a screenshot of the window as PNG."""
        shown = await self.call("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shown["data"]))


@asynccontextmanager
async def opened_browser(folder: Path) -> AsyncIterator[Page]:
    """Starts Chromium with an empty profile in ``folder`` and yields a tab. Ends Chromium after the block."""
    assert CHROMIUM is not None, "the caller must check that Chromium is installed"
    short = Path(tempfile.mkdtemp(prefix="chromium-"))  # Chromium's sockets need a short path
    profile = short / "profile"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with (folder / "chromium.log").open("w") as log:
        environment = {**os.environ, "TMPDIR": str(short)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        port = await _port(profile / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                tabs = await answer.json()
            address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(short, ignore_errors=True)


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while not (file.exists() and file.read_text().strip()):
        assert process.poll() is None, "chromium has ended"
        assert time.monotonic() < deadline, "chromium does not start"
        await asyncio.sleep(0.1)
    return int(file.read_text().split()[0])
