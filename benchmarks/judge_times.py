"""Measures what a judge costs, for `benchmarks.agents` without ``--learn``.

Two whole runs of the demo with a staleness of 2 take turns, one with a judge in an engine process of its own, and one
with the same reward as a rule; counted are the samples that are trained in a second, medians over the steps. The judge
has a core of its own, and all other processes share one other core in both runs, so two cores are enough.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean, median

import psutil

from benchmarks.demo_seeds import run_demo
from benchmarks.taught_models import judge_folder, judge_words

STALENESS = 2


@contextmanager
def judge_on_its_own_core(folder: Path) -> Iterator[None]:
    """Keeps this process and its children on one core, but for the engine of the model in ``folder``."""
    cores = os.sched_getaffinity(0)
    assert len(cores) > 1, "two cores are needed"
    one, other = sorted(cores)[:2]
    ended = threading.Event()

    def move() -> None:
        while not ended.wait(0.1):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error, OSError):  # it has ended
                    if str(folder) in process.cmdline():
                        for thread in process.threads():
                            os.sched_setaffinity(thread.id, {other})

    mover = threading.Thread(target=move)
    os.sched_setaffinity(0, {one})
    mover.start()
    try:
        yield
    finally:
        ended.set()
        mover.join()
        os.sched_setaffinity(0, cores)


def judge(*, rounds: int, steps: int) -> float:
    """Prints samples/s of runs with a judge and with the same reward as a rule; returns the ratio."""
    folder = judge_folder("rev")
    ways = {
        "a rule": ["reward=exact_match"],
        "a judge": ["reward=genrm", *judge_words("main", folder)],
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="relax-agents-") as scratch:
        for number in range(rounds):
            for name, words in ways.items():
                own = [f"run.steps={4 * steps}", "eval.every=0", f"mode.max_staleness={STALENESS}", "run.save_every=0"]
                with judge_on_its_own_core(folder):
                    summary = run_demo(Path(scratch) / f"{name} {number}".replace(" ", "-"), [*words, *own])
                rates[name].append(summary["samples_per_s"])
    ratios = [after / before for before, after in zip(rates["a rule"], rates["a judge"], strict=True)]
    print(
        f"  a judge: {fmean(rates['a judge']):.0f} samples/s, a rule: {fmean(rates['a rule']):.0f}; "
        f"ratio {median(ratios):.2f} ({', '.join(f'{one:.2f}' for one in ratios)})",
        flush=True,
    )
    return median(ratios)
