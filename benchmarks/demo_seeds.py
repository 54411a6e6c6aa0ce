"""The demo on several seeds, and a control whose reward is shuffled: does it learn, and from the reward alone?

    python -m benchmarks.demo_seeds [--seeds 5] [key=value ...]

One run after the other. Exit code 1 where a seed's last ten steps have fewer than 90 % exact answers, or the control's
have that many.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONTROL = ("reward=plugin", f"reward.name={Path(__file__).with_name('shuffled_reward.py')}")
GOAL = 0.9
DEADLINE_S = 900


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    arguments = parser.parse_args()
    runs = {f"seed {seed}": (f"seed={seed}",) for seed in range(arguments.seeds)} | {"control": ("seed=0", *CONTROL)}
    print(f"{'':10}{'reward':>16}{'exact':>16}{'held-out':>16}{'samples/s':>11}{'wall s':>8}", flush=True)
    reached = {}
    with tempfile.TemporaryDirectory(prefix="demo-seeds-") as scratch:
        for name, words in runs.items():
            summary = _run(Path(scratch) / name.replace(" ", "-"), (*arguments.overrides, *words))
            print(_line(name, summary), flush=True)
            reached[name] = summary["exact"]["last"] >= GOAL
    expected = {name: name != "control" for name in runs}
    wrong = [name for name, reaches in expected.items() if reached[name] != reaches]
    print(f"unexpected: {', '.join(wrong)}" if wrong else "every seed learns, the control does not")
    return 1 if wrong else 0


def _run(folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """One run of the demo; its summary."""
    command = [sys.executable, "-m", "relax_core", f"run.dir={folder}", "run.panel=false", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def _line(name: str, summary: dict[str, Any]) -> str:
    def change(first: float, last: float) -> str:
        return f"{first:.3f} → {last:.3f}".rjust(16)

    evaluated = summary["eval"]
    return (
        f"{name:10}"
        + change(summary["reward"]["first"], summary["reward"]["last"])
        + change(summary["exact"]["first"], summary["exact"]["last"])
        + (change(evaluated[0]["exact"], evaluated[-1]["exact"]) if evaluated else " " * 16)
        + f"{summary['samples_per_s']:11,.0f}{summary['wall_s']:8.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
