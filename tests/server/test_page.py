"""Tests the page in a headless Chromium without a network: every view of a small run, two widths, light and dark."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from relax_core.observe.alarms import AlarmLog
from relax_core.observe.event_log import EventWriter
from tests.server.browser import CHROMIUM, Page, opened_browser
from tests.server.made_run import make_run
from tests.server.page_server import Server

FAILED = "failed: rollout-0 failed: RuntimeError: reward_of_a_name_without_a_break_that_is_wider_than_a_telephone: <b>"
# View → a condition that is true when the view shows its content.
VIEWS = {
    "run": "document.querySelectorAll('.u-over').length >= 2 && document.querySelector('.bars')",
    "samples": "document.querySelectorAll('tbody tr').length == 10",
    "samples?side=g00000001": "document.querySelectorAll('.side article').length == 2",
    "samples?state=dropped&reason=stale": "document.querySelectorAll('tbody tr').length == 1",
    "evaluation": "document.querySelectorAll('tbody tr').length == 3",
    "evaluation?prompt=q0": "document.querySelector('tbody')?.innerText.includes('U+202E')",
    "pipeline": (
        "document.querySelectorAll('.bar-span').length > 4 && document.querySelectorAll('.thin').length == 2"
        " && document.querySelector('.told').textContent.startsWith('engine-1 is slow: 25% and 40 ms')"
    ),
    "pipeline?first=0&last=1&step=0": "document.body.innerText.includes('Samples of train step 0')",
    "engines": "document.querySelectorAll('tbody tr').length == 3 && document.querySelector('.u-over')",
    "config": "document.body.innerText.includes('run.steps')",
    "logs": "document.querySelector('pre')?.textContent.includes('<b>second')",
    "lineage": "document.body.innerText.includes('trained twice')",
    "lineage?uid=g00000001.0": "document.querySelector('main h2')?.textContent.includes('g00000001.0')",
    "compare": "document.querySelectorAll('.u-over').length >= 2 && document.body.innerText.includes('optimizer.lr')",
}


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: make dashboard-browser installs it as root")
def test_every_view_is_shown_and_asks_nobody_else(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first = make_run(runs / "first")
    second = make_run(runs / "second")
    config = second / "config.yaml"
    config.write_text(config.read_text() + "optimizer:\n  lr: 0.5\n")
    failed = make_run(runs / "failed_run_with_a_long_name_and_no_break_in_it_at_all")
    (failed / "config.yaml").write_text(config.read_text())
    (failed / "summary.json").write_bytes(msgspec.json.encode({"outcome": FAILED, "steps": 4}))
    for folder, event in ((first, "finished"), (failed, "failed")):
        alarm_log = AlarmLog(folder, repeat_s=0.0)
        alarm_log.report(event, "the run", title=f"demo: {event}", text=lambda: "after train step 4 " + "word" * 100)
    server = Server(runs)
    try:
        asyncio.run(_look(server, first, tmp_path))
    finally:
        server.stop()


async def _look(server: Server, run_dir: Path, folder: Path) -> None:
    base = f"http://127.0.0.1:{server.port}/"
    async with opened_browser(folder) as page:
        await page.size(1280, 900, dark=False)
        await page.call("Page.navigate", url=f"{base}#token={server.session.link_token}")
        await _look_at_the_list(page, run_dir.parent)
        assert "token" not in await page.run("location.href")
        name, hurdles = run_dir.name, list[str]()
        run = await page.run(
            f"[...document.querySelectorAll('#runs option')].find(o => o.text.startsWith('{name}')).value"
        )
        for view, ready in VIEWS.items():
            await page.run(f"location.hash = '#/{run}/{view}'")
            await page.until(ready)
            for width in (1280, 390):
                for dark in (False, True):
                    await page.size(width, 800, dark=dark)
                    hurdles += [f"{view}, {width} px, dark={dark}: {hurdle}" for hurdle in await page.hurdles()]
                wide = await page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert wide == 0, f"{view} is {wide} pixels wider than {width}"
            await page.size(1280, 900, dark=False)
            await page.picture(folder / "pictures" / f"{view.split('?')[0]}.png")
        await _look_at_a_sample(page, run)
        await _see_a_new_step(page, run, run_dir)
        assert hurdles == [], "\n".join(hurdles)
        assert page.errors == []
        assert [request for request in page.requests if not request.startswith(base)] == []
        assert await page.run("document.querySelectorAll('script:not([src]), img, iframe').length") == 0
        await page.run("document.body.append(document.createElement('button'))")
        assert [hurdle.partition(":")[0] for hurdle in await page.hurdles()] == ["button-name"]


async def _look_at_the_list(page: Page, runs: Path) -> None:
    """Checks the list: each run has a row with its outcome and a link to its view. Only the failed run has an alarm."""
    await page.until("document.querySelectorAll('main tbody tr').length == 3")
    assert "Runs" in await page.run("document.title") and await page.run("state.textContent") == ""
    cells = "[...document.querySelectorAll('main tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    rows = {row[0].split("\n")[0]: row[1:] for row in await page.run(cells)}
    assert rows.keys() == {path.name for path in runs.iterdir()}
    assert [rows["first"][0], *rows["first"][1:5]] == ["finished", "4 of 6", "0.3", "–", "10.5"]
    failed = next(path.name for path in runs.iterdir() if path.name.startswith("failed"))
    assert rows[failed][0].splitlines() == ["failed", FAILED.partition(": ")[2]]
    for down in (False, True):
        await page.run("document.querySelector('th button').click()")
        names = await page.run("[...document.querySelectorAll('td.run a')].map(a => a.textContent)")
        assert names == sorted(rows, reverse=down)
    for name, titles, colour in (("first", ["Notices (1)"], "finished"), (failed, ["Alarms (1)"], "failed")):
        await page.run("location.hash = '#/'")
        await page.until("document.querySelector('td.run')")
        for width in (1280, 390):
            await page.size(width, 800, dark=False)
            assert await page.run("document.documentElement.scrollWidth") <= width
            assert await page.hurdles() == []
        await page.run(f"[...document.querySelectorAll('td.run a')].find(a => a.textContent == '{name}').click()")
        await page.until(VIEWS["run"])
        assert await page.run("[...document.querySelectorAll('section summary')].map(s => s.textContent)") == titles
        assert await page.run("state.className") == f"badge {colour}"
        assert await page.run("document.documentElement.scrollWidth") <= 390, name
    await page.size(1280, 900, dark=False)


async def _look_at_a_sample(page: Page, run: str) -> None:
    """Searches by text, opens a sample, uses each colour, and checks that text with markup is escaped."""
    await page.run(f"location.hash = '#/{run}/samples'")
    await page.until(VIEWS["samples"])
    await page.run(
        "document.querySelector('[name=words]').value = 'ANSWER'; document.querySelector('form button').click()"
    )
    await page.until("document.body.innerText.includes('have these words')")
    await page.run(f"location.hash = '#/{run}/samples?uid=g00000001.1'")
    await page.until("document.querySelectorAll('tbody tr').length == 1")
    await page.run("document.querySelector('tbody a').click()")
    await page.until("document.querySelectorAll('.token').length == 6")
    for colour in ("logprob", "advantage", "gap", "trained", "version", "none"):
        await page.run(f"document.querySelector('article select').value = '{colour}'")
        await page.run("document.querySelector('article select').dispatchEvent(new Event('change'))")
        painted = await page.run("[...document.querySelectorAll('.token')].filter(t => t.style.backgroundColor).length")
        assert painted == (0 if colour == "none" else 3), colour
        assert f"colour={colour}" in await page.run("location.hash")
    text = await page.run("[...document.querySelectorAll('article .text')].map(t => t.textContent).join('')")
    assert "</script><img src=x onerror=alert(1)>U+202EabcU+001B[31m" in text
    await page.run("document.querySelectorAll('.token')[5].dispatchEvent(new Event('mouseenter'))")
    assert "trainer's log-prob -0.05" in await page.run("document.body.innerText")


async def _see_a_new_step(page: Page, run: str, run_dir: Path) -> None:
    """Checks that the open page shows a new step of the run without a reload."""
    await page.run(f"location.hash = '#/{run}/run'")
    await page.until(f"document.body.innerText.includes('4 of 6') && {VIEWS['run']}")
    await asyncio.sleep(2.0)  # the stream has sent the first state
    writer = EventWriter(run_dir, "actor", attempt=1)
    writer.record("actor", 4, {"reward": 0.9})
    writer.close()
    await page.until("document.body.innerText.includes('5 of 6')")
