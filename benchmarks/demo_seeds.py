"""Runs the demo on several seeds, and a control whose reward is shuffled.

    python -m benchmarks.demo_seeds [--seeds 5] [--load 0] [key=value ...]

The question is whether the demo learns from the reward alone, and keeps what it learnt. One run follows the other.
`--load N` keeps N processes computing during the runs: at staleness 1 the mix of weight versions depends on the
machine's speed. The held-out accuracy is that of greedy answers, evaluated every `eval.every` steps. The exit code is 1
if a seed ends below 0.97 held-out, if it falls by more than 0.03 from the best evaluation before, or if the control
ends at 0.5 or more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

CONTROL = ("reward=plugin", f"reward.name={Path(__file__).with_name('shuffled_reward.py')}")
GOAL, LARGEST_FALL, CONTROL_BOUND = 0.97, 0.03, 0.5
DEADLINE_S = 900
LEARNING_DEADLINE_S = 3600.0  # of a longer run, which other work on the machine may slow down


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--load", type=int, default=0, help="processes that compute beside the runs")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    arguments = parser.parse_args()
    runs = {f"seed {seed}": (f"seed={seed}",) for seed in range(arguments.seeds)} | {"control": ("seed=0", *CONTROL)}
    print(
        f"{'':10}{'reward':>16}{'exact':>16}{'held-out':>16}{'best':>7}{'fall':>7}{'samples/s':>11}{'wall s':>8}",
        flush=True,
    )
    wrong = []
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.load)]
    try:
        with tempfile.TemporaryDirectory(prefix="demo-seeds-") as scratch:
            for name, words in runs.items():
                summary = run_demo(Path(scratch) / name.replace(" ", "-"), (*arguments.overrides, *words))
                held_out = [evaluation["exact"] for evaluation in summary["eval"]]
                print(_line(name, summary, held_out), flush=True)
                if not (held_out[-1] < CONTROL_BOUND if name == "control" else _is_kept(held_out)):
                    wrong.append(name)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"unexpected: {', '.join(wrong)}" if wrong else "every seed learns and keeps it, the control does not")
    return 1 if wrong else 0


def _is_kept(held_out: Sequence[float]) -> bool:
    return held_out[-1] >= GOAL and largest_fall(held_out) <= LARGEST_FALL


def largest_fall(accuracies: Sequence[float]) -> float:
    """How far an accuracy lies below the best one before it, at most."""
    best = accumulate(accuracies, max)
    return max(highest - accuracy for highest, accuracy in zip(best, accuracies, strict=True))


def run_demo(folder: Path, overrides: Sequence[str], *, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """Runs the demo once and returns its summary."""
    command = [sys.executable, "-m", "relax_core", f"run.dir={folder}", "run.panel=false", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def _line(name: str, summary: dict[str, Any], held_out: Sequence[float]) -> str:
    def change(first: float, last: float) -> str:
        return f"{first:.3f} → {last:.3f}".rjust(16)

    return (
        f"{name:10}"
        + change(summary["reward"]["first"], summary["reward"]["last"])
        + change(summary["exact"]["first"], summary["exact"]["last"])
        + change(held_out[0], held_out[-1])
        + f"{max(held_out):7.3f}{largest_fall(held_out):7.3f}"
        + f"{summary['samples_per_s']:11,.0f}{summary['wall_s']:8.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
