"""Trains the tiny models that see on several seeds, with controls and with a part of the model frozen.

    python -m benchmarks.see_seeds [--seeds 3] [--only NAME …] [--results FILE] [key=value …]

Each row of the table is one whole run on data=see; figures are held-out greedy accuracies by part (chance 0.25). In a
control, each row shows the picture or video of any row, so only the words can be learnt. The exit code is 1 if a run
that may see ends below 0.95, or a part of it below 0.9, or if a control's pictures or videos are above 0.33 or its
words below 0.9, or if a run with mode=colocate starts above 0.65; the first evaluation of others may contain answers of
later versions. What frozen runs reach is only printed. In "dense, kills", a worker that encodes, the
engine, the rollout and the trainer's rank get SIGKILL, and the ledger's file must be exact. One run follows the other.
With ``--results``, each finished run is added to the file, and a run that the file has is not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo_seeds import DEADLINE_S, run_demo
from tests.integration.live_run import ENGINE, ROLLOUT, LiveRun

PARTS = ("colour", "direction", "word")
START_BOUND, GOAL, PART_GOAL, BLIND_BOUND = 0.65, 0.95, 0.9, 0.33
MOE = ("model=tiny_qwen3_vl_moe", "algo.routing_replay=true")
# With 256 held-out rows, as the others have, one part in twenty would be above the bound by chance.
CONTROL = ("data.task=see_exchanged", "data.eval_size=1024", "eval.rows=1024")

SGLANG_PYTHON = Path(".venv-sglang/bin/python")
# What gets SIGKILL, each after a train step.
KILLS = {2: "relax_core.data.media.encode_worker_main", 10: ENGINE, 25: ROLLOUT, 45: "ray::PolicyTrainer"}

Figures = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """Is one kind of run. ``expects`` is "sees", "blind", or nothing if its figures are only printed.

    ``needs`` is a file without which the kind is left out.
    """

    words: tuple[str, ...]
    expects: str = "sees"
    all_seeds: bool = True
    kills: bool = False
    needs: Path | None = None


CASES = {
    "dense, async": Case(("model=tiny_qwen3_vl",)),
    "dense, colocate": Case(("model=tiny_qwen3_vl", "mode=colocate"), all_seeds=False),
    "experts, async": Case(MOE),
    "experts, colocate": Case((*MOE, "mode=colocate"), all_seeds=False),
    "dense, exchanged": Case(("model=tiny_qwen3_vl", *CONTROL), expects="blind"),
    "experts, exchanged": Case((*MOE, *CONTROL), expects="blind", all_seeds=False),
    "dense, kills": Case(
        ("model=tiny_qwen3_vl", "modality.workers=1", "run.save_every=20"), all_seeds=False, kills=True
    ),
    "dense, SGLang": Case(
        ("model=tiny_qwen3_vl", "engine=sglang", f"engine.python={SGLANG_PYTHON}"), all_seeds=False, needs=SGLANG_PYTHON
    ),
    "tower frozen": Case(("model=tiny_qwen3_vl", "model.freeze=[vision,projector]"), expects="", all_seeds=False),
    "only the tower": Case(("model=tiny_qwen3_vl", "model.freeze=[language]"), expects="", all_seeds=False),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="which kinds of runs")
    parser.add_argument("--results", type=Path, default=None, help="file of finished runs, one JSON record a line")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    arguments = parser.parse_args()
    left_out = [name for name in arguments.only if (file := CASES[name].needs) is not None and not file.exists()]
    names = [name for name in arguments.only if name not in left_out]
    runs = [(name, seed) for name in names for seed in range(arguments.seeds if CASES[name].all_seeds else 1)]
    print(f"{'run':22}{'seed':>5}" + "".join(f"{name:>18}" for name in ("held-out", *PARTS)) + f"{'wall s':>8}")
    wrong, finished = [], _finished(arguments.results)
    with tempfile.TemporaryDirectory(prefix="see-seeds-") as scratch:
        for name, seed in runs:
            words = ("data=see", *arguments.overrides, *CASES[name].words, f"seed={seed}")
            figures = finished.get(words)
            if figures is None:
                folder = Path(scratch) / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
                summary = run_with_kills(folder, words) if CASES[name].kills else run_demo(folder, words)
                figures = _figures(summary)
                if arguments.results is not None:
                    with arguments.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"words": words, "figures": figures}) + "\n")
            print(_line(name, seed, figures), flush=True)
            if not _as_expected(CASES[name], figures):
                wrong.append(f"{name}, seed {seed}")
    for name in left_out:
        print(f"{name}: not run, because there is no {CASES[name].needs} (make sglang-cpu)")
    print(f"unexpected: {'; '.join(wrong)}" if wrong else "every run that may see learns to see, and no control does")
    return 1 if wrong else 0


def run_with_kills(folder: Path, words: tuple[str, ...]) -> dict[str, Any]:
    """Kills processes of a run, one after the other, and returns its summary.

    Raises AssertionError if a sample is lost or trained twice by the ledger's file, or if something is left behind.
    """
    with LiveRun(folder, *words) as live:
        for step, process in KILLS.items():
            live.wait_step(step)
            live.kill(process)
        finished = live.finish(deadline_s=DEADLINE_S)
    assert finished.code == 0, finished.output
    finished.assert_books_closed()
    return finished.summary


def _finished(results: Path | None) -> dict[tuple[str, ...], Figures]:
    if results is None or not results.is_file():
        return {}
    records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {tuple(record["words"]): record["figures"] for record in records}


def _figures(summary: Mapping[str, Any]) -> Figures:
    """Returns the first and the last accuracy by part, and the seconds of the run."""
    first, last = summary["eval"][0], summary["eval"][-1]
    parts = {part: [each["figures"][f"{part}/exact"] for each in (first, last)] for part in PARTS}
    return {"held-out": [first["exact"], last["exact"]], **parts, "wall_s": [summary["wall_s"]]}


def _as_expected(case: Case, figures: Figures) -> bool:
    first, last = figures["held-out"]
    colour, direction, word = (figures[part][-1] for part in PARTS)
    if case.expects == "sees":
        started_low = first <= START_BOUND or "mode=colocate" not in case.words
        return started_low and last >= GOAL and min(colour, direction, word) >= PART_GOAL
    if case.expects == "blind":
        return max(colour, direction) <= BLIND_BOUND and word >= PART_GOAL
    return True


def _line(name: str, seed: int, figures: Figures) -> str:
    pairs = [figures[column] for column in ("held-out", *PARTS)]
    columns = "".join(f"{before:.3f} → {after:.3f}".rjust(18) for before, after in pairs)
    return f"{name:22}{seed:5}{columns}{figures['wall_s'][0]:8.0f}"


if __name__ == "__main__":
    sys.exit(main())
