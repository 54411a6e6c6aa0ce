"""Trains the tiny models that see on several seeds, with controls and with a part of the model frozen.

    python -m benchmarks.see_seeds [--seeds 3] [--only NAME …] [key=value …]

Each row of the table is one whole run on data=see; figures are held-out greedy accuracies by part (chance 0.25). In a
control, each row shows the picture or video of any row, so only the words can be learnt. The exit code is 1 if a run
that may see ends below 0.95, or a part of it below 0.9, or if a control's pictures or videos are above 0.33 or its
words below 0.9. What frozen runs reach is only printed. One run follows the other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo_seeds import run_demo

PARTS = ("colour", "direction", "word")
GOAL, PART_GOAL, BLIND_BOUND = 0.95, 0.9, 0.33
MOE = ("model=tiny_qwen3_vl_moe", "algo.routing_replay=true")
CONTROL = "data.task=see_exchanged"


@dataclass(frozen=True)
class Case:
    """Is one kind of run. ``expects`` is "sees", "blind", or nothing if its figures are only printed."""

    words: tuple[str, ...]
    expects: str = "sees"
    all_seeds: bool = True


CASES = {
    "dense, async": Case(("model=tiny_qwen3_vl",)),
    "dense, colocate": Case(("model=tiny_qwen3_vl", "mode=colocate"), all_seeds=False),
    "experts, async": Case(MOE),
    "experts, colocate": Case((*MOE, "mode=colocate"), all_seeds=False),
    "dense, exchanged": Case(("model=tiny_qwen3_vl", CONTROL), expects="blind"),
    "experts, exchanged": Case((*MOE, CONTROL), expects="blind", all_seeds=False),
    "tower frozen": Case(("model=tiny_qwen3_vl", "model.freeze=[vision,projector]"), expects="", all_seeds=False),
    "only the tower": Case(("model=tiny_qwen3_vl", "model.freeze=[language]"), expects="", all_seeds=False),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="which kinds of runs")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    arguments = parser.parse_args()
    print(f"{'run':22}{'seed':>5}" + "".join(f"{name:>18}" for name in ("held-out", *PARTS)) + f"{'wall s':>8}")
    wrong = []
    with tempfile.TemporaryDirectory(prefix="see-seeds-") as scratch:
        for name in arguments.only:
            case = CASES[name]
            for seed in range(arguments.seeds if case.all_seeds else 1):
                folder = Path(scratch) / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
                summary = run_demo(folder, ("data=see", *arguments.overrides, *case.words, f"seed={seed}"))
                first, last = summary["eval"][0], summary["eval"][-1]
                print(_line(name, seed, first, last, summary["wall_s"]), flush=True)
                if not _as_expected(case.expects, last):
                    wrong.append(f"{name}, seed {seed}")
    print(f"unexpected: {'; '.join(wrong)}" if wrong else "every run that may see learns to see, and no control does")
    return 1 if wrong else 0


def _as_expected(expects: str, last: Mapping[str, Any]) -> bool:
    parts = {part: last["figures"][f"{part}/exact"] for part in PARTS}
    if expects == "sees":
        return last["exact"] >= GOAL and min(parts.values()) >= PART_GOAL
    if expects == "blind":
        return max(parts["colour"], parts["direction"]) <= BLIND_BOUND and parts["word"] >= PART_GOAL
    return True


def _line(name: str, seed: int, first: Mapping[str, Any], last: Mapping[str, Any], wall_s: float) -> str:
    pairs = [(first["exact"], last["exact"])]
    pairs += [(first["figures"][f"{part}/exact"], last["figures"][f"{part}/exact"]) for part in PARTS]
    figures = "".join(f"{before:.3f} → {after:.3f}".rjust(18) for before, after in pairs)
    return f"{name:22}{seed:5}{figures}{wall_s:8.0f}"


if __name__ == "__main__":
    sys.exit(main())
