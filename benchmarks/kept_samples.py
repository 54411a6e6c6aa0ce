"""Measures what a run pays for its kept samples and for an open page: the demo with and without, in turns.

    python -m benchmarks.kept_samples [--pairs 5 --steps 300]

One run of each pair keeps all samples while `relax dashboard` serves it to a reader that asks as the view of a run
does; the other keeps none and has no page. Samples/s are the median over the train steps, and processor time is that of
all processes of the run, of which the last 0.2 s are not seen. The page's own process is told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.two_checkouts import HERE, Turn, run_demo

EVERY_S = 2.0  # between two questions of the view of a run
TAGS = "actor/reward,actor/exact,actor/response_tokens,actor/loss,actor/grad_norm,actor/entropy,actor/step_ms"
ASK_S = 60.0
MEGABYTE = 1e6


@dataclass
class Page:
    """Holds the figures of the page's process."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_mb: float = 0.0
    answers: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="train steps of a run")
    given = parser.parse_args()
    pairs: list[tuple[Turn, Turn]] = []
    for pair in range(given.pairs):
        found: dict[str, Turn] = {}
        for kept in ("0", "all") if pair % 2 else ("all", "0"):
            found[kept], page = _run(kept, steps=given.steps, seed=pair)
            one = found[kept]
            print(
                f"samples={kept}: {one.samples_per_s:.0f} samples/s, {sum(one.cpu_s.values()):.1f} s of processor time"
            )
            if page.answers:
                print(
                    f"  page: {100 * page.cpu_s / page.wall_s:.2f} % of a core, {page.memory_mb:.0f} MB, "
                    f"{page.answers} answers",
                    flush=True,
                )
        pairs.append((found["0"], found["all"]))
    speeds = sorted(kept.samples_per_s / none.samples_per_s for none, kept in pairs)
    times = sorted(sum(kept.cpu_s.values()) / sum(none.cpu_s.values()) for none, kept in pairs)
    print(f"all samples and a page over none, {given.pairs} pairs of {given.steps} steps: median (least to largest)")
    for what, ratios in (("samples/s", speeds), ("processor time", times)):
        print(f"  {what:<16} {median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


def _run(kept: str, *, steps: int, seed: int) -> tuple[Turn, Page]:
    with tempfile.TemporaryDirectory(prefix="relax-kept-") as folder:
        more = (f"tracker.samples={kept}",)
        if kept == "0":
            return run_demo(HERE, steps=steps, seed=seed, more=more, below=Path(folder)), Page()
        with _open_page(Path(folder)) as page:
            turn = run_demo(HERE, steps=steps, seed=seed, more=more, below=Path(folder))
        return turn, page


@contextmanager
def _open_page(folder: Path) -> Iterator[Page]:
    """Serves the page of the runs below a folder to one reader."""
    page, ended = Page(), threading.Event()
    command = [sys.executable, "-m", "relax_core", "dashboard", str(folder), "--port=0"]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "XDG_CACHE_HOME": str(folder / "cache")}
    began = time.monotonic()
    with subprocess.Popen(command, cwd=HERE, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None, "it is a pipe"
        address, _, token = next(line for line in server.stdout if "#token=" in line).strip().partition("#token=")
        reader = threading.Thread(target=_read, args=(address, token, page, ended))
        reader.start()
        try:
            yield page
        finally:
            ended.set()
            reader.join()
            stat = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
            page.cpu_s = sum(map(int, stat[11:13])) / os.sysconf("SC_CLK_TCK")
            page.memory_mb = int(stat[21]) * os.sysconf("SC_PAGE_SIZE") / MEGABYTE
            page.wall_s = time.monotonic() - began
            server.terminate()


def _read(address: str, token: str, page: Page, ended: threading.Event) -> None:
    with urllib.request.urlopen(f"{address}api/session", data=token.encode(), timeout=ASK_S) as answer:
        known = {"Authorization": f"Bearer {json.load(answer)['session']}"}

    def ask(path: str) -> bytes:
        request = urllib.request.Request(f"{address}api/{path}", headers=known)
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:
            page.answers += 1
            return bytes(answer.read())

    stream = None
    while not ended.wait(EVERY_S):
        runs = msgspec.json.decode(ask("runs"), type=list[dict[str, str]])
        if not runs:
            continue
        run = runs[0]["id"]
        if stream is None:
            request = urllib.request.Request(f"{address}api/run/{run}/stream", headers=known)
            stream = urllib.request.urlopen(request, timeout=ASK_S)
        ask(f"run/{run}")
        ask(f"run/{run}/series?points=800&tags={TAGS}")
    if stream is not None:
        stream.close()


if __name__ == "__main__":
    main()
