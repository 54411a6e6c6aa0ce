"""`relax compare multirun/…` compares runs in tables and in a plot: each run, and means over seeds."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from relax_core.contracts.output_path import check_output_file
from relax_core.observe.event_log import ACTOR, EVAL, MetricRecord, by_step, read_metrics, without_undone
from relax_core.observe.report import draw_picture, picture_figure
from relax_core.observe.standard_streams import unread_streams
from relax_core.observe.summary import SUMMARY_FILE

_NOT_COMPARED = ("seed", "resume", "plan", "run", "launcher")  # values that differ between seeds, and locations


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Holds ``mean`` and sample standard deviation ``std`` of ``count`` values. ``std`` is 0 for one value."""

    mean: float
    std: float
    count: int

    def describe(self, form: str) -> str:
        """Returns "mean ± std" with both numbers in the format ``form``."""
        return f"{format(self.mean, form)} ± {format(self.std, form)}"


def spread_of(values: Sequence[float]) -> Spread:
    """Returns mean and deviation of ``values``, which must not be empty."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Spread(mean=mean, std=math.sqrt(squares / max(1, len(values) - 1)), count=len(values))


def settings_of(folder: Path) -> str | None:
    """Returns the settings of a run without the seed, as JSON. Runs with equal settings differ only in their seed.

    Returns None if the run's config.yaml does not exist or names no seed.
    """
    file = folder / "config.yaml"
    values: Any = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    if not isinstance(values, dict) or values.get("seed") is None:
        return None
    kept = {key: value for key, value in values.items() if key not in _NOT_COMPARED}
    return json.dumps(kept | {"run.steps": values.get("run", {}).get("steps")}, sort_keys=True)


def mean_curve(curves: Sequence[Mapping[int, float]]) -> dict[int, Spread]:
    """Returns step → mean and spread, for the steps that all non-empty curves contain."""
    curves = [curve for curve in curves if curve]
    steps = set(curves[0]).intersection(*curves[1:]) if curves else set()
    return {step: spread_of([curve[step] for curve in curves]) for step in sorted(steps)}


PICTURE = "compare.png"
USAGE = 2  # exit code of this command if there is nothing to compare
REFUSED = 2  # exit code of a run that could not start
Curve = tuple[str, str, str]  # name of the value, source, title
REWARD = ("reward", ACTOR, "mean reward in training")
EXACT = ("exact", EVAL, "exact answers on held-out prompts")
EXACT_IN_TRAINING = ("exact", ACTOR, "exact answers in training")
COLOURS = ("#1f5fa8", "#d9660a", "#2b8a3e", "#b5179e", "#5a5a5a", "#0b7285", "#c92a2a", "#7950f2", "#996600", "#3d3d3d")
STYLES = ("-", "--", ":")
SMOOTH = 25  # a curve is a moving mean over a 25th of its steps


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """Describes a run in a comparison.

    ``label`` is a short unique name. ``folder`` is None if the run never started. ``summary`` is None if the run has
    not ended. ``outcome`` is one or two words. ``cause`` says why the run was refused or not started. ``settings`` is
    equal for runs that differ only in their seed, and None if unknown. ``group_label`` is a short name for all runs
    with equal ``settings``.
    """

    label: str
    folder: Path | None
    summary: dict[str, Any] | None
    outcome: str
    cause: str = ""
    settings: str | None = None
    group_label: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0, or 2 if there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="relax compare", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="folders of sweeps (multirun/…) or of runs (runs/…)")
    parser.add_argument("--picture", type=Path, help=f"a new file; default: {PICTURE} in the first folder")
    parsed = parser.parse_args(arguments)
    try:
        if parsed.picture is not None:
            check_output_file(parsed.picture, option="--picture")
        show(parsed.folders, picture=parsed.picture)
    except ValueError as error:
        print(f"relax: {error}", file=sys.stderr)
        return USAGE
    return 0


def show(folders: Sequence[Path], *, picture: Path | None = None) -> None:
    """Prints the tables and draws the curves. Raises ValueError for a folder that is not a sweep or a run."""
    runs = [run for folder in folders for run in read_runs(folder)]
    print(table(runs))
    for run in runs:
        if run.cause:
            print(f"\n  {run.label}: {run.cause}")
    if groups := [group for group in by_settings(runs) if len(group) > 1]:
        print(f"\n{seeds_table(groups)}")
    drawn, problem = draw_picture(lambda: draw(runs, picture if picture is not None else folders[0] / PICTURE))
    none = "no step to draw yet" if problem is None else f"the curves are left out: {problem}"
    print(f"\n  curves  {drawn}" if drawn is not None else f"\n  {none}")


def read_runs(folder: Path) -> list[ComparedRun]:
    """Returns the runs of a sweep in order, or the run in the folder."""
    index = folder / "sweep.json"
    if index.is_file():
        rows = json.loads(index.read_text(encoding="utf-8"))["runs"]
        labels = _short([row["overrides"] for row in rows])
        return [_run(row, label, group_label=_without_seed(label)) for row, label in zip(rows, labels, strict=True)]
    if (folder / "config.yaml").is_file():
        return [_run({"folder": str(folder)}, folder.absolute().name, group_label=folder.absolute().parent.name)]
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder. Give folders under multirun/ or runs/.")
    raise ValueError(f"{folder}: it has neither sweep.json nor config.yaml. Give folders under multirun/ or runs/.")


def table(runs: Sequence[ComparedRun]) -> str:
    """Returns a table with one row per run: outcome, steps, results and speed.

    A star marks the best of a column.
    """
    rows = [_metrics(run.summary) for run in runs]
    best = {name: max((value for row in rows if (value := row[name]) is not None), default=None) for name in _COLUMNS}
    lines = [["run", "outcome", "steps", *_COLUMNS.values()]]
    for run, row in zip(runs, rows, strict=True):
        steps = "" if run.summary is None else str(run.summary["steps"])
        words = (_cell_text(name, row[name], best[name], len(runs)) for name in _COLUMNS)
        lines.append([run.label, run.outcome, steps, *words])
    return _aligned(lines)


def by_settings(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Groups the runs that differ only in their seed. Groups are in the order of their first runs."""
    groups: dict[str, list[ComparedRun]] = {}
    for number, run in enumerate(runs):
        groups.setdefault(run.settings or f"run {number}", []).append(run)
    return list(groups.values())


def seeds_table(groups: Sequence[Sequence[ComparedRun]]) -> str:
    """Returns a table with one row per group of `by_settings`.

    The values are mean and sample standard deviation over the finished runs.
    """
    lines = [["over seeds", "finished", *_COLUMNS.values()]]
    for group in groups:
        ended = [_metrics(run.summary) for run in group if run.outcome == "finished"]
        values = {name: [value for row in ended if (value := row[name]) is not None] for name in _COLUMNS}
        words = [spread_of(found).describe(_FORMS.get(name, ".3f")) if found else "" for name, found in values.items()]
        lines.append([group[0].group_label, f"{len(ended)} of {len(group)}", *words])
    return _aligned(lines)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = ("  ".join(_pad(c, w, i) for i, (c, w) in enumerate(zip(line, widths, strict=True))) for line in lines)
    return "\n".join(f"  {line}" for line in padded)


def draw(runs: Sequence[ComparedRun], path: Path) -> Path | None:
    """Draws the curves of all runs as a PNG. Returns its path, or None if no run has a step yet.

    Runs that differ only in their seed are drawn as one mean curve with a band of one standard deviation.
    """
    figure = picture_figure(figsize=(12, 4.8), dpi=120, layout="constrained")
    from matplotlib.ticker import MaxNLocator  # only after `picture_figure` has imported matplotlib

    drawn = drawn_runs(runs)
    curves = curves_of([held for variant in drawn for held in variant.records])
    axes = figure.subplots(1, len(curves))
    some = False
    last = max((record.step for variant in drawn for held in variant.records for record in held), default=1) or 1
    for axis, (name, source, title) in zip(axes, curves, strict=True):
        for number, variant in enumerate(drawn):
            curve = mean_curve([_points(held, name, source) for held in variant.records])
            if curve:
                some = True
                _plot(axis, curve, number, label=variant.label, marked=source == EVAL)
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


@dataclass(frozen=True, kw_only=True)
class DrawnRuns:
    """Describes one curve. ``records`` has the metrics of each run that the curve averages."""

    label: str
    records: Sequence[Sequence[MetricRecord]]


def drawn_runs(runs: Sequence[ComparedRun]) -> list[DrawnRuns]:
    """Returns the curves to draw. Runs that differ only in their seed become one curve.

    A mean curve ends with its shortest run. So unfinished runs are used only if no run of the group has finished.
    """
    drawn = []
    for group in by_settings([run for run in runs if run.folder is not None]):
        counted = [run for run in group if run.outcome == "finished"] or group
        label = counted[0].label if len(counted) == 1 else f"{group[0].group_label}, {len(counted)} seeds"
        records = [without_undone(read_metrics(run.folder)) for run in counted if run.folder is not None]
        drawn.append(DrawnRuns(label=label, records=records))
    return drawn


def _points(records: Sequence[MetricRecord], name: str, source: str) -> dict[int, float]:
    return {step: values[name] for step, values in by_step(records, source).items() if name in values}


def _plot(axis: Any, curve: Mapping[int, Spread], number: int, *, label: str, marked: bool) -> None:
    colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
    smooth = list if marked else _smooth
    means = smooth([spread.mean for spread in curve.values()])
    spreads = smooth([spread.std for spread in curve.values()])
    axis.plot(
        list(curve), means, label=label, linewidth=1.8, marker="o" if marked else "", color=colour, linestyle=style
    )
    if any(spreads):
        low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
        axis.fill_between(list(curve), low, high, color=colour, alpha=0.15, linewidth=0)


def curves_of(records: Sequence[Sequence[MetricRecord]]) -> tuple[Curve, Curve]:
    """Returns the two metrics to draw. If no run was evaluated, the second metric is exact answers in training."""
    evaluated = any(record.source == EVAL for held in records for record in held)
    return REWARD, EXACT if evaluated else EXACT_IN_TRAINING


_FORMS = {"samples_per_s": ",.0f"}
_COLUMNS = {"reward": "reward", "exact": "exact", "eval": "held-out exact", "samples_per_s": "samples/s"}


def _metrics(summary: dict[str, Any] | None) -> dict[str, float | None]:
    if summary is None:
        return dict.fromkeys(_COLUMNS)
    return {
        "reward": summary["reward"]["last"],
        "exact": summary["exact"]["last"],
        "eval": summary["eval"][-1]["exact"] if summary["eval"] else None,
        "samples_per_s": summary["samples_per_s"],
    }


def _cell_text(name: str, value: float | None, best: float | None, count: int) -> str:
    if value is None:
        return ""
    star = "*" if count > 1 and value == best else " "
    return format(value, _FORMS.get(name, ".3f")) + star


def _pad(word: str, width: int, column: int) -> str:
    return word.ljust(width) if column < 2 else word.rjust(width)


def _without_seed(label: str) -> str:
    return " ".join(word for word in label.split() if not word.startswith("seed=")) or "all"


def _run(row: Mapping[str, Any], label: str, *, group_label: str) -> ComparedRun:
    """Reads a run. ``row`` is an entry of sweep.json, or has only the folder."""
    folder = Path(row["folder"]) if row["folder"] is not None else None
    file = folder / SUMMARY_FILE if folder is not None else None
    summary = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else None
    cause, refused = row.get("cause") or "", row.get("code") == REFUSED
    if summary is not None:
        outcome = str(summary["outcome"]).split(":")[0]
    else:
        outcome = "refused" if refused else "not started" if cause else "not ended"
    return ComparedRun(
        label=label,
        folder=folder,
        summary=summary,
        outcome=outcome,
        cause=cause,
        settings=settings_of(folder) if folder is not None else None,
        group_label=group_label,
    )


def _short(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Returns, for each run, the overrides that differ between the runs."""
    same = set(overrides[0]).intersection(*overrides[1:]) if len(overrides) > 1 else set()
    return [" ".join(word for word in words if word not in same) or f"run {n}" for n, words in enumerate(overrides)]


def _smooth(values: Sequence[float]) -> list[float]:
    """Returns moving means over the last steps. The window is shorter at the beginning."""
    window = max(1, len(values) // SMOOTH)
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


if __name__ == "__main__":
    with unread_streams():
        sys.exit(main())
