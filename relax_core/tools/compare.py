"""`python -m relax_core.tools.compare multirun/…`: runs side by side, as a table and as curves in one picture."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.observe.records import ACTOR, EVAL, MetricRecord, by_step, without_undone
from relax_core.observe.sinks import read_metrics
from relax_core.observe.summary import SUMMARY_FILE

PICTURE = "compare.png"
USAGE = 2
Curve = tuple[str, str, str]  # name of the value, source, title
REWARD = ("reward", ACTOR, "mean reward in training")
EXACT = ("exact", EVAL, "exact answers on held-out prompts")
EXACT_IN_TRAINING = ("exact", ACTOR, "exact answers in training")
COLOURS = ("#1f5fa8", "#d9660a", "#2b8a3e", "#b5179e", "#5a5a5a", "#0b7285", "#c92a2a", "#7950f2", "#996600", "#3d3d3d")
STYLES = ("-", "--", ":")
SMOOTH = 25  # curves are means over a 25th of their steps


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """``label``: what tells it from the others. ``summary``: None for a run that has not ended."""

    label: str
    folder: Path
    summary: dict[str, Any] | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 where there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="relax compare", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="folders of sweeps (multirun/…) or of runs (runs/…)")
    parser.add_argument("--picture", type=Path, help=f"default: {PICTURE} in the first folder")
    words = parser.parse_args(arguments)
    try:
        show(words.folders, picture=words.picture)
    except ValueError as error:
        print(f"relax: {error}", file=sys.stderr)
        return USAGE
    return 0


def show(folders: Sequence[Path], *, picture: Path | None = None) -> None:
    """Prints the table and draws the curves. Raises ValueError where a folder is no sweep's and no run's."""
    runs = [run for folder in folders for run in read_runs(folder)]
    print(table(runs))
    drawn = draw(runs, picture if picture is not None else folders[0] / PICTURE)
    print(f"\n  curves  {drawn}" if drawn is not None else "\n  no step to draw yet")


def read_runs(folder: Path) -> list[ComparedRun]:
    """The runs of a sweep in their order, or the one run of this folder."""
    index = folder / "sweep.json"
    if index.is_file():
        rows = json.loads(index.read_text(encoding="utf-8"))["runs"]
        labels = _short([row["overrides"] for row in rows])
        return [_run(Path(row["folder"]), label) for row, label in zip(rows, labels, strict=True)]
    if (folder / "config.yaml").is_file():
        return [_run(folder, folder.name)]
    raise ValueError(f"{folder}: it has neither sweep.json nor config.yaml. Give folders under multirun/ or runs/.")


def table(runs: Sequence[ComparedRun]) -> str:
    """One line a run: how it ended, how far it came, how good and how fast it was. The best of a column has a star."""
    rows = [_figures(run.summary) for run in runs]
    best = {name: max((value for row in rows if (value := row[name]) is not None), default=None) for name in _COLUMNS}
    lines = [["run", "outcome", "steps", *_COLUMNS.values()]]
    for run, row in zip(runs, rows, strict=True):
        outcome = "not ended" if run.summary is None else str(run.summary["outcome"]).split(":")[0]
        steps = "" if run.summary is None else str(run.summary["steps"])
        lines.append([run.label, outcome, steps, *(_word(name, row[name], best[name], len(runs)) for name in _COLUMNS)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  " + "  ".join(_pad(c, w, i) for i, (c, w) in enumerate(zip(line, widths, strict=True))) for line in lines
    )


def draw(runs: Sequence[ComparedRun], path: Path) -> Path | None:
    """A PNG with all runs' curves; None where no run has a step yet."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    records = [without_undone(read_metrics(run.folder)) for run in runs]
    curves = curves_of(records)
    axes = figure.subplots(1, len(curves))
    some = False
    last = max((record.step for held in records for record in held), default=1) or 1
    for axis, (name, source, title) in zip(axes, curves, strict=True):
        for number, (run, held) in enumerate(zip(runs, records, strict=True)):
            points = {step: values[name] for step, values in by_step(held, source).items() if name in values}
            if points:
                some = True
                style = {
                    "color": COLOURS[number % len(COLOURS)],
                    "linestyle": STYLES[number // len(COLOURS) % len(STYLES)],
                }
                values = list(points.values()) if source == EVAL else _smooth(list(points.values()))
                axis.plot(
                    list(points), values, label=run.label, linewidth=1.8, marker="o" if source == EVAL else "", **style
                )
        axis.set_title(title, loc="left", fontsize=12, fontweight="bold")
        axis.set_xlabel("train step")
        axis.set_xlim(-0.02 * last, 1.02 * last)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(axis="y", color="#e3e3e3", linewidth=0.8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    if not some:
        return None
    axes[1].set_ylim(-0.04, 1.04)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    figure.savefig(path)
    return path


def curves_of(records: Sequence[Sequence[MetricRecord]]) -> tuple[Curve, Curve]:
    """What is drawn of these runs: where none of them was evaluated, exact answers in training."""
    evaluated = any(record.source == EVAL for held in records for record in held)
    return REWARD, EXACT if evaluated else EXACT_IN_TRAINING


_COLUMNS = {"reward": "reward", "exact": "exact", "eval": "held-out exact", "samples_per_s": "samples/s"}


def _figures(summary: dict[str, Any] | None) -> dict[str, float | None]:
    if summary is None:
        return dict.fromkeys(_COLUMNS)
    return {
        "reward": summary["reward"]["last"],
        "exact": summary["exact"]["last"],
        "eval": summary["eval"][-1]["exact"] if summary["eval"] else None,
        "samples_per_s": summary["samples_per_s"],
    }


def _word(name: str, value: float | None, best: float | None, count: int) -> str:
    if value is None:
        return ""
    star = "*" if count > 1 and value == best else " "
    return (f"{value:,.0f}" if name == "samples_per_s" else f"{value:.3f}") + star


def _pad(word: str, width: int, column: int) -> str:
    return word.ljust(width) if column < 2 else word.rjust(width)


def _run(folder: Path, label: str) -> ComparedRun:
    file = folder / SUMMARY_FILE
    summary = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    return ComparedRun(label=label, folder=folder, summary=summary)


def _short(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Only what is not the same in all runs."""
    same = set(overrides[0]).intersection(*overrides[1:]) if len(overrides) > 1 else set()
    return [" ".join(word for word in words if word not in same) or f"run {n}" for n, words in enumerate(overrides)]


def _smooth(values: Sequence[float]) -> list[float]:
    """Means over the last few steps; as many as there are at the beginning."""
    window = max(1, len(values) // SMOOTH)
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


if __name__ == "__main__":
    sys.exit(main())
