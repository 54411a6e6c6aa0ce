"""Compares the final scores and the speed of learning of all algorithms on the demo, from the same initial model.

    python -m benchmarks.algorithms --results /tmp/algorithms.jsonl    # prints a table
    python -m benchmarks.algorithms --seeds 1 --only gspo sapo --override optimizer.lr=3e-3

A run takes about twenty seconds and then adds one line to --results. Runs with a line in that file are skipped, so the
same command continues an interrupted benchmark.

``reward``: mean over the first ten and over the last ten train steps. ``exact``: share of exact greedy answers on the
held-out split, before and after training. ``steps``: train steps until the share of exact sampled answers, averaged
over ten steps, first reached 0.9. For algorithms that drop groups, the share covers trained groups only. ``cut``: share
of tokens that the loss clips. ``groups``: number of generated groups per trained group. These columns come from runs
with mode=async and seeds 0, 1, …. ``colocate``: the share of exact greedy answers after training with
mode=colocate and seed 0. ``teacher``: for distillation, the teacher's share of exact greedy answers. ``distill_grpo``:
the teacher is the student after a grpo run with the same seed, read from the hf/ folder of that run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from benchmarks.harness import FinishedRun, Metrics, run_relax
from relax_core.config.compose import compose
from relax_core.registry import names

WINDOW = 10  # steps that are averaged
SOLVED = 0.9
DEADLINE_S = 1200
ASYNC, COLOCATE = "async", "colocate"
DISTILL, FROM_GRPO = "distill", "distill_grpo"
ROWS = sorted([*names("algo"), FROM_GRPO])
HEADINGS = (
    "algorithm",
    "reward first → last",
    "exact before → after",
    "steps to exact ≥ 0.9",
    "colocate",
    "teacher",
    "cut",
    "groups",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Defines one run of the table. For the row ``distill_grpo``, another run trains the teacher first."""

    row: str
    mode: str
    seed: int
    steps: int
    overrides: tuple[str, ...] = ()


def main() -> int:
    arguments = _parse()
    overrides = tuple(arguments.override)
    runs = list(planned(arguments.only or ROWS, seeds=arguments.seeds, steps=arguments.steps, overrides=overrides))
    done = read_results(arguments.results) if arguments.results else {}
    for run in runs:
        if run in done:
            continue
        done[run] = _figures(run)
        print(f"{run.row} {run.mode} seed {run.seed}: {json.dumps(done[run])}", file=sys.stderr, flush=True)
        if arguments.results:
            write_result(arguments.results, run, done[run])
    print(table({run: done[run] for run in runs if run in done}, seeds=arguments.seeds))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each algorithm, with seeds 0, 1, …")
    parser.add_argument("--steps", type=int, default=compose([]).run.steps, help="train steps of a run")
    parser.add_argument("--only", nargs="+", choices=ROWS, help="only these rows")
    parser.add_argument("--override", nargs="+", default=[], help="overrides for every run, as on the command line")
    parser.add_argument("--results", type=Path, help="JSON lines of finished runs, which are not repeated")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.steps < 2 * WINDOW:
        parser.error(f"--seeds: 1 or more; --steps: {2 * WINDOW} or more")
    return arguments


# -- runs -------------------------------------------------------------------------------------------------------------
def planned(rows: Sequence[str], *, seeds: int, steps: int, overrides: tuple[str, ...]) -> Iterator[Run]:
    """Yields the runs seed by seed. An interrupted benchmark then has a complete table of fewer seeds."""
    for seed in range(seeds):
        for row in rows:
            yield Run(row=row, mode=ASYNC, seed=seed, steps=steps, overrides=overrides)
    for row in rows:
        yield Run(row=row, mode=COLOCATE, seed=0, steps=steps, overrides=overrides)


def read_results(file: Path) -> dict[Run, Metrics]:
    """Returns the finished runs of a results file. Skips an incomplete last line."""
    if not file.exists():
        return {}
    found = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {
        Run(**{**result["run"], "overrides": tuple(result["run"]["overrides"])}): result["figures"] for result in found
    }


def write_result(file: Path, run: Run, figures: Metrics) -> None:
    """Appends a line to the results file, in place of an incomplete last line."""
    whole = file.read_text().rpartition("\n")[:2] if file.exists() else ()
    partial = file.with_suffix(".partial")
    partial.write_text("".join(whole) + json.dumps({"run": asdict(run), "figures": figures}) + "\n")
    partial.replace(file)


def _figures(run: Run) -> Metrics:
    with tempfile.TemporaryDirectory(prefix="relax-algorithms-") as name:
        folder = Path(name)
        keys = [f"algo={run.row}"]
        level: float | None = _level_of_builtin_teacher() if run.row == DISTILL else None
        if run.row == FROM_GRPO:
            grpo = [*_common(run), "algo=grpo", f"eval.every={run.steps}", "run.export_hf=true"]
            level = _relax(folder / "grpo", run, grpo).summary["eval"][-1]["exact"]
            keys = [f"algo={DISTILL}", f"algo.teachers.default={folder / 'grpo' / 'hf'}"]
        keys = [*_common(run), *keys, f"eval.every={run.steps}", "run.export_hf=false"]
        figures = run_metrics(_relax(folder / "run", run, keys))
    return figures if level is None else figures | {"teacher": level}


@cache
def _level_of_builtin_teacher() -> float:
    """Returns the teacher's share of exact answers. Runs the teacher with an evaluation before the first step."""
    run = Run(row="grpo", mode=COLOCATE, seed=0, steps=1)
    with tempfile.TemporaryDirectory(prefix="relax-algorithms-") as name:
        keys = [*_common(run), "model.builtin=tiny_qwen3_teacher", "eval.every=1", "run.export_hf=false"]
        return _relax(Path(name) / "run", run, keys).summary["eval"][0]["exact"]


def _common(run: Run) -> list[str]:
    return [f"mode={run.mode}", f"run.steps={run.steps}", f"seed={run.seed}", "run.save_every=0"]


def _relax(run_dir: Path, run: Run, keys: Sequence[str]) -> FinishedRun:
    return run_relax(run_dir, *keys, *run.overrides, deadline_s=DEADLINE_S)


# -- metrics ----------------------------------------------------------------------------------------------------------
def run_metrics(run: FinishedRun) -> Metrics:
    """Returns the metrics of a finished run."""
    actor, evaluations, ledger = list(run.steps().values()), run.summary["eval"], run.summary["ledger"]
    solved = steps_to(SOLVED, [record["exact"] for record in actor])
    return {
        "reward_first": fmean(record["reward"] for record in actor[:WINDOW]),
        "reward_last": fmean(record["reward"] for record in actor[-WINDOW:]),
        "exact_before": evaluations[0]["exact"],
        "exact_after": evaluations[-1]["exact"],
        **({} if solved is None else {"steps": float(solved)}),
        "cut": fmean(record["algorithm/clip_low"] + record["algorithm/clip_high"] for record in actor),
        "groups": ledger["issued"] / ledger["trained"],
    }


def steps_to(level: float, values: Sequence[float]) -> int | None:
    """Returns the number of steps until the mean of the last `WINDOW` values reaches ``level``, or None."""
    for end in range(WINDOW, len(values) + 1):
        if fmean(values[end - WINDOW : end]) >= level:
            return end
    return None


# -- print-out --------------------------------------------------------------------------------------------------------
def table(done: Mapping[Run, Metrics], *, seeds: int) -> str:
    """Returns a Markdown table of means over the seeds. ``steps`` lists every seed, and "—" marks a missing value."""
    rows = [HEADINGS, ("---",) * len(HEADINGS)]
    for name in sorted({run.row for run in done}):
        runs = [done[run] for run in sorted(done, key=lambda run: run.seed) if (run.row, run.mode) == (name, ASYNC)]
        if not runs:
            continue
        mean = {key: fmean(run[key] for run in runs) for key in runs[0] if key not in ("steps", "teacher")}
        taking_turns = [
            figures["exact_after"] for run, figures in done.items() if (run.row, run.mode) == (name, COLOCATE)
        ]
        teachers = [run["teacher"] for run in runs if "teacher" in run]
        rows.append(
            (
                name,
                f"{mean['reward_first']:.2f} → {mean['reward_last']:.2f}",
                f"{mean['exact_before']:.2f} → {mean['exact_after']:.2f}",
                ", ".join(f"{run['steps']:.0f}" if "steps" in run else "—" for run in runs),
                f"{taking_turns[0]:.2f}" if taking_turns else "—",
                f"{fmean(teachers):.2f}" if teachers else "—",
                f"{100 * mean['cut']:.1f} %",
                f"{mean['groups']:.2f}",
            )
        )
    steps, overrides = next(((run.steps, run.overrides) for run in done), (0, ()))
    with_keys = f" With {' '.join(overrides)}." if overrides else ""
    head = f"{steps} train steps of the demo, {'one seed' if seeds == 1 else f'{seeds} seeds'}.{with_keys}"
    return "\n".join([head, "", *("| " + " | ".join(row) + " |" for row in rows)])


if __name__ == "__main__":
    sys.exit(main())
