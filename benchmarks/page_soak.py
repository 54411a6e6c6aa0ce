"""Leaves the page of a run open for hours: ``python -m benchmarks.page_soak [--hours 2]``.

The demo trains until the time is over, and headless Chromium shows the page that its gateway serves. Printed every ten
minutes are the train step, the memory of the gateway and of the tab's process (the resident memory that they share with
nobody), and the tab's JavaScript heap after a garbage collection. The last lines compare the medians of the ten minutes
after the first ten with those of the last ten. Exit code 1 if one grew by more than 10%, if the page said an error, or
if the run failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import psutil

from tests.integration.elastic_run import ElasticRun
from tests.integration.live_run import LiveRun
from tests.server.browser import Page, opened_browser

OVERRIDES = ("gateway.port=0", "run.steps=1000000", "run.save_every=2000", "run.export_hf=false")
SAMPLE_S, TOLD_S, MIB = 20.0, 600.0, 1 << 20
REACH = 0.10
Figures = dict[str, float]  # memory in MiB


def own_memory(pid: int) -> float:
    """Returns the resident memory in MiB that a process shares with no other."""
    return float(psutil.Process(pid).memory_full_info().uss) / MIB


async def figures(page: Page, *, gateway: int, tab: int) -> Figures:
    """Returns the memory of the gateway's process, of the tab's process and of its heap."""
    await page.call("HeapProfiler.collectGarbage")
    heap = (await page.call("Runtime.getHeapUsage"))["usedSize"] / MIB
    return {"gateway": own_memory(gateway), "tab": own_memory(tab), "heap of the tab": heap}


def renderer() -> int:
    """Returns the process of this process's browser that shows the page, which uses more memory than its spare ones."""
    mine = [one for one in psutil.Process().children(recursive=True) if "--type=renderer" in one.cmdline()]
    return max(mine, key=lambda one: one.memory_info().rss).pid


async def watch(live: LiveRun, folder: Path, *, hours: float) -> tuple[list[tuple[float, Figures]], list[str]]:
    """Returns (seconds since the page was open, figures) of each moment, and what the page's console said."""
    gateway = json.loads((live.folder / "gateway.json").read_text())
    found: list[tuple[float, Figures]] = []
    async with opened_browser(folder) as page:
        await page.size(1280, 900, dark=False)
        await page.call("Page.navigate", url=gateway["page"])
        await page.until("document.querySelectorAll('canvas').length > 3")
        tab, began, told = renderer(), time.monotonic(), 0.0
        while (age_s := time.monotonic() - began) < 3600 * hours and live.running():
            found.append((age_s, await figures(page, gateway=gateway["pid"], tab=tab)))
            if age_s >= told:
                told += TOLD_S
                step = ElasticRun(live).ask("GET", "/run")["step"]
                print(f"{age_s / 60:.0f} min, step {step}: {words(found[-1][1])}", flush=True)
            page.requests.clear()
            await asyncio.sleep(SAMPLE_S)
        await page.picture(folder / "page.png")
        return found, page.errors


def words(values: Mapping[str, float]) -> str:
    """Says the figures."""
    return ", ".join(f"{name} {value:.1f} MiB" for name, value in values.items())


def compare(found: list[tuple[float, Figures]]) -> bool:
    """Prints the medians of the second ten minutes and of the last ten; returns whether none grew too much."""
    last = found[-1][0]
    early = [one for age_s, one in found if TOLD_S <= age_s < 2 * TOLD_S]
    late = [one for age_s, one in found if age_s > last - TOLD_S]
    flat = True
    for name in found[0][1]:
        before, after = (median(one[name] for one in part) for part in (early, late))
        print(f"{name}: {before:.1f} and {after:.1f} MiB, {100 * (after / before - 1):+.1f}%")
        flat &= after <= before * (1 + REACH)
    return flat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--picture", type=Path, help="a folder for a picture of the page at its end")
    parser.add_argument("overrides", nargs="*", help="key=value of the run")
    given = parser.parse_args()
    if 3600 * given.hours < 3 * TOLD_S:
        parser.error(f"--hours={given.hours:g}: ten minutes are compared with later ones. Give 0.5 or more.")
    with tempfile.TemporaryDirectory(prefix="relax-soak-") as name:
        folder = given.picture or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        with LiveRun(Path(name) / "run", *OVERRIDES, *given.overrides) as live:
            live.wait_step(10)
            found, errors = asyncio.run(watch(live, folder, hours=given.hours))
            step = ElasticRun(live).ask("GET", "/run")["step"]
            ElasticRun(live).stop()
    flat = compare(found)
    print(f"{step} train steps, {len(found)} samples; the page said {errors or 'no error'}")
    return int(not flat or bool(errors))


if __name__ == "__main__":
    sys.exit(main())
