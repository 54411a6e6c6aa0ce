"""Every algorithm on the demo (reverse_digits, mode=async), from the same warm start: how far, and in how many steps.

    python -m benchmarks.algorithms --seeds 3                 # prints the table
    python -m benchmarks.algorithms --seeds 3 --docs          # and puts it into docs/algorithms.md
    python -m benchmarks.algorithms --seeds 1 --only gspo sapo --override optimizer.lr=3e-3

``reward``: mean of the first and of the last ten train steps. ``exact``: share of exact greedy answers of the held-out
split before and after training. ``steps``: train steps until the mean share of exact sampled answers of the last ten
steps reached 0.9; of an algorithm that drops groups it counts what was trained on. ``cut``: share of tokens whose
gradient the loss held back. ``groups``: prompt groups that were generated for one that was trained on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from relax_core.config.compose import compose
from relax_core.observe.records import ACTOR, EVAL, by_step
from relax_core.observe.sinks import read_metrics
from relax_core.registry import names

WINDOW = 10  # steps that a figure is averaged over
SOLVED = 0.9
DEADLINE_S = 1200
DOCS = Path(__file__).resolve().parents[1] / "docs" / "algorithms.md"
BEGIN, END = "<!-- benchmarks.algorithms: begin -->", "<!-- benchmarks.algorithms: end -->"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
HEADINGS = ("algorithm", "reward first → last", "exact before → after", "steps to exact ≥ 0.9", "cut", "groups")

Figures = dict[str, float]


def main() -> None:
    arguments = _parse()
    found: dict[str, list[Figures]] = {}
    for algorithm in arguments.only or names("algo"):
        found[algorithm] = []
        for seed in range(arguments.seeds):
            found[algorithm].append(_run(algorithm, arguments.override, steps=arguments.steps, seed=seed))
            print(f"{algorithm} seed {seed}: {json.dumps(found[algorithm][-1])}", file=sys.stderr, flush=True)
    written = table(found, steps=arguments.steps, seeds=arguments.seeds, overrides=arguments.override)
    print(written)
    if arguments.docs:
        text = DOCS.read_text()
        before, rest = text.split(BEGIN)
        DOCS.write_text(f"{before}{BEGIN}\n{written}\n{END}{rest.split(END)[1]}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each algorithm, with seeds 0, 1, …")
    parser.add_argument("--steps", type=int, default=compose([]).run.steps, help="train steps of a run")
    parser.add_argument("--only", nargs="+", choices=names("algo"), help="these algorithms alone")
    parser.add_argument("--override", nargs="+", default=[], help="more keys for every run, as on the command line")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/algorithms.md")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.steps < 2 * WINDOW:
        parser.error(f"--seeds: 1 or more; --steps: {2 * WINDOW} or more")
    if arguments.docs and arguments.only:
        parser.error("--docs writes the table of all algorithms: leave --only away")
    return arguments


def _run(algorithm: str, overrides: Sequence[str], *, steps: int, seed: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="relax-algorithms-") as folder:
        run_dir = Path(folder) / "run"
        keys = [f"algo={algorithm}", "mode=async", f"run.steps={steps}", f"seed={seed}", f"run.dir={run_dir}"]
        keys += [f"eval.every={steps}", "run.save_every=0", "run.export_hf=false", "run.panel=false", *overrides]
        ended = subprocess.run(
            [sys.executable, "-m", "relax_core", *keys],
            env=os.environ | ONE_THREAD,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        if ended.returncode:
            raise SystemExit(f"python -m relax_core {' '.join(keys)} ended with {ended.returncode}:\n{ended.stderr}")
        records = read_metrics(run_dir)
        summary = json.loads((run_dir / "summary.json").read_text())
    actor = list(by_step(records, ACTOR).values())
    return run_figures(actor, list(by_step(records, EVAL).values()), summary)


def run_figures(
    actor: Sequence[Mapping[str, float]], evaluations: Sequence[Mapping[str, float]], summary: Mapping[str, Any]
) -> Figures:
    """A run's figures from the trainer's records, the evaluations and the summary."""
    ledger = summary["ledger"]
    solved = steps_to(SOLVED, [one["exact"] for one in actor])
    return {
        "reward_first": fmean(one["reward"] for one in actor[:WINDOW]),
        "reward_last": fmean(one["reward"] for one in actor[-WINDOW:]),
        "exact_before": evaluations[0]["exact"],
        "exact_after": evaluations[-1]["exact"],
        **({} if solved is None else {"steps": float(solved)}),
        "cut": fmean(one["algorithm/clip_low"] + one["algorithm/clip_high"] for one in actor),
        "groups": ledger["issued"] / ledger["trained"],
    }


def steps_to(level: float, values: Sequence[float]) -> int | None:
    """Steps done when the mean of the last `WINDOW` values first reaches ``level``; None when it never does."""
    for end in range(WINDOW, len(values) + 1):
        if fmean(values[end - WINDOW : end]) >= level:
            return end
    return None


# -- print-out --------------------------------------------------------------------------------------------------------
def table(found: Mapping[str, Sequence[Figures]], *, steps: int, seeds: int, overrides: Sequence[str]) -> str:
    """A Markdown table: means over the seeds, of the steps each seed's own figure."""
    rows = [HEADINGS, ("---",) * len(HEADINGS)]
    for algorithm, runs in found.items():
        mean = {name: fmean(run[name] for run in runs) for name in runs[0] if name != "steps"}
        rows.append(
            (
                algorithm,
                f"{mean['reward_first']:.2f} → {mean['reward_last']:.2f}",
                f"{mean['exact_before']:.2f} → {mean['exact_after']:.2f}",
                ", ".join(f"{run['steps']:.0f}" if "steps" in run else "—" for run in runs),
                f"{100 * mean['cut']:.1f} %",
                f"{mean['groups']:.2f}",
            )
        )
    with_keys = f" With {' '.join(overrides)}." if overrides else ""
    head = f"{steps} train steps of the demo, {'one seed' if seeds == 1 else f'{seeds} seeds'}.{with_keys}"
    return "\n".join([head, "", *("| " + " | ".join(row) + " |" for row in rows)])


if __name__ == "__main__":
    main()
