"""Compares the text demo of two checkouts: samples a second, first step, memory of each process.

    git worktree add /tmp/old COMMIT
    python -m benchmarks.two_checkouts --old /tmp/old [--turns 5 --steps 120]

Both run in turns, from the same environment and with the same seeds. A figure is that of this checkout over that of the
old one: the median of the turns' ratios for the times, the ratio of medians for memory, which is the most anonymous
memory that a process of its name had.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.throughput import ASYNC, DEADLINE_S, ONE_THREAD, OVERRIDES, QUIET_RUN, SKIPPED_STEPS
from relax_core.observe.service.records import ACTOR, by_step
from relax_core.observe.service.sinks import read_metrics

HERE = Path(__file__).parents[1]
LOOK_S = 0.2  # seconds between two looks at the processes
MARK = "RELAX_BENCHMARK_RUN"  # an environment variable that all processes of a run inherit
REACH = 0.03


@dataclass
class Turn:
    """Holds the figures of one run; memory in MB by the name of the process, processor time in s by its number."""

    samples_per_s: float = 0.0
    first_step_s: float = 0.0
    memory: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="folder of the other checkout")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120, help="train steps of a run")
    arguments = parser.parse_args()
    found: dict[str, list[Turn]] = {"old": [], "new": []}
    checkouts = {"old": arguments.old.resolve(), "new": HERE}
    for turn in range(arguments.turns):
        for name in sorted(checkouts, reverse=turn % 2 == 0):
            one = run_demo(checkouts[name], steps=arguments.steps, seed=turn)
            found[name].append(one)
            print(f"{name}: {one.samples_per_s:.0f} samples/s, first step after {one.first_step_s:.1f} s", flush=True)
    pairs = list(zip(found["old"], found["new"], strict=True))
    print(f"new over old, {arguments.turns} turns (reach: within {REACH:.0%})")
    print(f"  samples/s   {median(new.samples_per_s / old.samples_per_s for old, new in pairs):.3f}")
    print(f"  first step  {median(new.first_step_s / old.first_step_s for old, new in pairs):.3f}")
    for process in sorted({name for turns in found.values() for one in turns for name in one.memory}):
        old, new = (median(one.memory.get(process, 0.0) for one in found[name]) for name in ("old", "new"))
        print(f"  {process:<44} {old:7.1f} to {new:7.1f} MB" + (f"  {new / old:.3f}" if old else ""))


def run_demo(checkout: Path, *, steps: int, seed: int, more: Sequence[str] = (), below: Path | None = None) -> Turn:
    """Runs the demo of a checkout to its end and returns its figures.

    ``more`` are further settings, and the run's folder is made ``below`` a folder while it runs.
    """
    turn = Turn()
    with tempfile.TemporaryDirectory(prefix="relax-checkouts-", dir=below) as folder:
        run = Path(folder) / "run"
        ended = threading.Event()
        settings = (*OVERRIDES[ASYNC], *QUIET_RUN, f"run.steps={steps}", f"seed={seed}", f"run.dir={run}", *more)
        looks = threading.Thread(target=_look, args=(str(run), turn, ended))
        looks.start()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "relax_core", *settings],
                cwd=checkout,
                env=os.environ | ONE_THREAD | {"PYTHONPATH": str(checkout), MARK: str(run)},
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        finally:
            ended.set()
            looks.join()
        if done.returncode:
            raise SystemExit(f"the run of {checkout} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        turn.first_step_s = json.loads((run / "summary.json").read_text())["first_step_s"]
        actor = by_step(read_metrics(run), ACTOR)
    measured = [actor[step] for step in sorted(actor)[SKIPPED_STEPS:-1]]
    turn.samples_per_s = median(1e3 * one["samples"] / one["step_ms"] for one in measured)
    return turn


def _look(run: str, turn: Turn, ended: threading.Event) -> None:
    """Records the most anonymous memory and the processor time of each process of a run, until the run has ended."""
    mark = f"{MARK}={run}".encode()
    while not ended.wait(LOOK_S):
        for process in Path("/proc").iterdir():
            if not process.name.isdigit():
                continue
            try:
                if mark not in (process / "environ").read_bytes().split(b"\0"):
                    continue
                name = _name((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                found = re.search(r"RssAnon:\s+(\d+)", (process / "status").read_text())
                ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
            except OSError:  # it has ended
                continue
            turn.cpu_s[process.name] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            if found is not None:
                turn.memory[name] = max(turn.memory.get(name, 0.0), int(found[1]) / 1e3)


def _name(command: str) -> str:
    """Returns what a process is: the class that Ray runs, the module, or else the program."""
    found = re.match(r"ray::[\w.]+", command) or re.search(r"-m \S+", command)
    return found[0] if found else command.split(" ", 1)[0].rpartition("/")[2]


if __name__ == "__main__":
    main()
