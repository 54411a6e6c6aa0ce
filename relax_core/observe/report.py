"""Prints the report at the end of a run: results, answers before and after training, files, and useful next commands.

`plot_curves` draws reward and accuracy to curves.png.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relax_core.contracts.sink import SAMPLED_MARKS
from relax_core.observe.event_log import ACTOR, EVAL, MetricRecord, TextCell, by_step, without_undone
from relax_core.observe.panel import UNKNOWN, ShownConsole, duration, number, staleness_shares
from relax_core.observe.sample_log import SAMPLES_FOLDER
from relax_core.observe.summary import STEP_PARTS, SUMMARY_FILE
from relax_core.observe.trackers.file_sinks import METRICS_FILE, TENSORBOARD_FOLDER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Answer = Mapping[str, TextCell]

SHOWN_ANSWERS = 8
CELL_WIDTH = 60
MAX_CHARACTERS = 4000  # limit of the shown episode; texts.jsonl has the whole text
NO_WIDTH = 1000  # columns; every line of the report is shorter
CHECKPOINTS_FOLDER = "checkpoints"
CURVES_FILE = "curves.png"
RESULT_FILES = (
    ("reward curve", CURVES_FILE),
    ("checkpoints", CHECKPOINTS_FOLDER),
    ("best checkpoint", f"{CHECKPOINTS_FOLDER}/best"),
    ("Hugging Face model", "hf"),
    ("TensorBoard log", TENSORBOARD_FOLDER),
    ("samples", SAMPLES_FOLDER),
    ("all numbers", METRICS_FILE),
    ("summary", SUMMARY_FILE),
    ("process logs", "logs"),
)


def report_console() -> Console:
    """Returns a console for stdout. It does not wrap lines in a file, because users search logs by line."""
    return ShownConsole() if sys.stdout.isatty() else ShownConsole(width=NO_WIDTH)


def print_report(
    console: Console,
    run_dir: Path,
    summary: Mapping[str, Any],
    texts_before: Sequence[Answer],
    texts_after: Sequence[Answer],
) -> None:
    """Prints the report. The texts are rows of the first and of the newest evaluation (`TextRecord`)."""
    console.print()
    console.print(_headline(summary))
    for finding in summary["findings"]:
        console.print(Text(finding, style="bold yellow"), soft_wrap=True)
    console.print(_metrics(summary))
    answers = answers_table(texts_before, texts_after)
    if answers.row_count:
        console.print()
        console.print(answers)
        if episode := played_episode(texts_before, texts_after):
            console.print(Text("\nOne of these episodes after training; sampled text is in ⟦ ⟧", style="bold"))
            console.print(episode, soft_wrap=True)
    console.print()
    for file_line in _result_lines(run_dir):
        console.print(file_line, soft_wrap=True)
    commands = next_commands(run_dir, summary)
    if commands:
        console.print()
        console.print("Try next", style="bold")
    for command, purpose in commands:
        console.print(Text.assemble("  ", (command, "cyan"), ("  # " + purpose, "dim")), soft_wrap=True)


def answers_table(before: Sequence[Answer], after: Sequence[Answer]) -> Table:
    """Builds a table of prompts with the expected answer and the answers of the two evaluations.

    The table has the prompts that both evaluations contain. Changed answers come first, to show the effect of training.
    """
    pairs = _pairs(before, after)
    table = Table(title="Held-out prompts, greedy answers", title_justify="left", title_style="bold", show_lines=False)
    for heading in ("prompt", "expected", "before", "after"):
        table.add_column(heading, overflow="fold")
    for old, new in pairs[:SHOWN_ANSWERS]:
        table.add_row(_cell(new["prompt"]), _cell(new["answer"]), _answer(old), _answer(new))
    return table


def _pairs(before: Sequence[Answer], after: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """Returns (old answer, new answer) for each prompt in both evaluations. Answers that became right come first."""
    first = {answer["prompt"]: answer for answer in before}
    pairs = [(first[answer["prompt"]], answer) for answer in after if answer["prompt"] in first]
    return sorted(pairs, key=lambda pair: (pair[0]["exact"] == pair[1]["exact"], not pair[1]["exact"]))


def played_episode(before: Sequence[Answer], after: Sequence[Answer]) -> Text | None:
    """Returns the first multi-turn episode of the table with all turns, from the newest evaluation, or None."""
    for _, newest in _pairs(before, after):
        if SAMPLED_MARKS[0] in (message := str(newest["response"])):
            shown = Text(message[:MAX_CHARACTERS] + ("…" if len(message) > MAX_CHARACTERS else ""), style="dim")
            shown.highlight_regex(f"(?s){SAMPLED_MARKS[0]}.*?{SAMPLED_MARKS[1]}", "not dim green")
            return shown
    return None


def next_commands(run_dir: Path, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns pairs (command, purpose) of commands that are useful after this run.

    Commands that repeat the run contain its overrides, ``summary["run"]["overrides"]``.
    """
    overrides = summary["run"].get("overrides", [])
    finished = summary["outcome"] == "finished"
    saved = _saved(run_dir)
    commands = []
    if any((run_dir / CHECKPOINTS_FOLDER).glob("*")):
        here = (f"run.dir={run_dir}", "resume=auto")  # without run.dir, resume=auto selects the newest of all runs
        if finished:
            commands.append(_train_on(saved, overrides, here, steps=summary["steps"]))
        else:
            commands.append((_command(overrides, *here), "go on from the newest checkpoint"))
    if (run_dir / METRICS_FILE).exists():
        page = shlex.join(["python", "-m", "relax_core", "dashboard", str(run_dir)])
        commands.append((page, "curves, samples and lanes over time in the browser"))
    if (run_dir / TENSORBOARD_FOLDER).exists():
        commands.append(
            (f"tensorboard --logdir {shlex.quote(str(run_dir / TENSORBOARD_FOLDER))}", "look at every curve")
        )
    sampled = summary["reward"]["last"] is not None or summary["loss"]["last"] is None
    if finished and not sampled and (hf := run_dir / "hf").is_dir():
        own = ("model=folder", f"model.path={hf}", "data=file", "data.path=ROWS.jsonl", "reward=math")
        commands.append((_command((), *own), "reinforcement learning from this model"))
    if finished and sampled:
        new = [override for override in overrides if _key(override) != "run.dir"]  # a new run has a new folder
        alone = saved.get("rollout", {}).get("workers", 1) == 1 and not saved.get("placement", {}).get("gpus_per_node")
        if saved.get("mode", {}).get("name") != "colocate" and "mode=colocate" not in overrides and alone:
            dropped = [override for override in new if _key(override) != "mode.max_staleness"]
            commands.append((_command(dropped, "mode=colocate"), "the same run, strictly on-policy"))
        if not saved.get("rollout", {}).get("lockstep"):
            commands.append((_command(new, "mode=async", "mode.max_staleness=4"), "let rollouts run further ahead"))
        own = ("model=qwen3", "model.path=FOLDER", "data=file", "data.path=ROWS.jsonl", "reward=math")
        commands.append((_command((), *own), "your own model and data"))
    return commands


def _saved(run_dir: Path) -> dict[str, Any]:
    """Returns the run's configuration. Empty if the run ended before config.yaml was written."""
    file = run_dir / "config.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _train_on(
    saved: Mapping[str, Any], overrides: Sequence[str], here: Sequence[str], *, steps: int
) -> tuple[str, str]:
    """Returns the command that doubles the steps of a finished run, and its purpose.

    If the longer schedule makes the learning rate jump, the purpose says so.
    """
    from relax_core.config.learning_rate_schedule import (
        learning_rate_jump_message,  # imports OmegaConf, which a tracker's process does not need
    )

    changes = [*here, f"run.steps={2 * steps}"]
    if not saved:
        return _command(overrides, *changes), "train on"
    if saved["run"].get("epochs") is not None:  # epochs would override run.steps
        changes.append("run.epochs=null")
    jump = learning_rate_jump_message(saved, {**saved, "run": {**saved["run"], "steps": 2 * steps}}, step=steps)
    return _command(overrides, *changes), "train on" + (f"; {jump}" if jump else "")


def _command(overrides: Sequence[str], *changes: str) -> str:
    """Returns the command line with ``changes``. A change replaces overrides of its key and of keys below its key."""
    replaced = tuple(_key(change) for change in (*changes, "resume="))
    kept = [override for override in overrides if not any(_covers(key, _key(override)) for key in replaced)]
    return shlex.join(["python", "-m", "relax_core", *kept, *changes])


def _key(override: str) -> str:
    """Returns the key of an override, without leading pluses."""
    return override.partition("=")[0].lstrip("+")


def _covers(key: str, other_key: str) -> bool:
    return other_key == key or other_key.startswith(key + ".")


def _headline(summary: Mapping[str, Any]) -> Text:
    outcome = summary["outcome"]
    finished = "bold yellow" if summary["findings"] else "bold green"
    style = {"finished": finished, "stopped": "bold yellow"}.get(outcome, "bold red")
    return Text.assemble(
        (outcome, style), f" after {summary['steps']} train steps in {duration(summary['wall_s'])}", overflow="fold"
    )


def _metrics(summary: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    sampled = summary["reward"]["last"] is not None or summary["loss"]["last"] is None
    for name, label in (("reward", "reward"), ("exact", "exact answers")) if sampled else (("loss", "loss"),):
        ends = summary[name]
        table.add_row(label, f"{number(ends['first'], '.3f')} → [bold]{number(ends['last'], '.3f')}[/] in training")
    if sampled:
        table.add_row("answers", _answers(summary))
    if summary["eval"] and summary["eval"][-1]["exact"] is None:
        for row in _held_out_losses(summary["eval"][0], summary["eval"][-1]):
            table.add_row(*row)
    elif summary["eval"]:
        first, last = summary["eval"][0], summary["eval"][-1]
        table.add_row(
            "held-out",
            f"{first['exact']:.3f} at step {first['step']} → [bold]{last['exact']:.3f}[/] at step {last['step']}, "
            f"{last['rows']} prompts",
        )
        if (shadow := last["figures"].get("shadow")) is not None:
            table.add_row("held-out, by shadow", f"{shadow:.3f} at step {last['step']} (reward.shadow)")
    if best := summary.get("best"):
        table.add_row("best", f"{best['metric']} {best['value']:.3f} at step {best['step']}")
    table.add_row(
        "speed",
        f"{number(summary['samples_per_s'], ',.0f')} samples/s · {number(summary['tokens_per_s'], ',.0f')} tokens/s · "
        f"first step after {duration(summary['first_step_s'])}",
    )
    table.add_row("step", _step_split(summary["step_ms"]))
    histogram = {int(staleness): count for staleness, count in summary["staleness"]["histogram"].items()}
    shares = " · ".join(f"{staleness}: {share:.0%}" for staleness, share in staleness_shares(histogram))
    table.add_row("staleness", shares or "–")
    table.add_row("log-prob gap", _logprob_gap(summary["logprob_gap"]))
    table.add_row("samples", Text(_ledger(summary["ledger"])))
    for name, modality in summary.get("modalities", {}).items():
        table.add_row(name.replace("_", " + "), Text(_modality(modality)))
    if summary["records_dropped"]:
        missing = ", ".join(f"{count:,} in {sink}" for sink, count in summary["records_dropped"].items())
        table.add_row("metrics", Text(f"records missing: {missing}"))
    if "repeatable" in summary["run"]:
        effect = "repeats this run" if summary["run"]["repeatable"] else "gives another run, which depends on timing"
        if (steps := summary["run"].get("repeatable_steps")) is not None:
            effect = f"repeats {steps} train steps of this run; then an engine joined"
        table.add_row("seed", f"the same seed, {summary['run']['seed']}, {effect}")
    return table


def _held_out_losses(first: Mapping[str, Any], last: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields a label and a text for the loss, and the share of correct preferences, on held-out data rows."""
    for name, label in (("loss", "held-out loss"), ("preference_accuracy", "held-out pairs")):
        if name in last["figures"]:
            before, after = first["figures"].get(name), last["figures"][name]
            yield (
                label,
                f"{number(before, '.3f')} at step {first['step']} → [bold]{after:.3f}[/] at step {last['step']}, "
                f"{last['rows']} rows",
            )


def _answers(summary: Mapping[str, Any]) -> str:
    lengths, cut = summary["response_tokens"], summary["truncated"]["last"]
    least, largest = number(lengths["min"], ".0f"), number(lengths["max"], ".0f")
    return (
        f"{number(lengths['last'], '.1f')} tokens ({least} to {largest}) · {number(cut, '.0%')} cut · "
        f"entropy {number(summary['entropy']['last'], '.3f')} nats · "
        f"rewards equal in {number(summary['groups_without_signal']['last'], '.0%')} of the groups"
    )


def _logprob_gap(gap: Mapping[str, float | None]) -> str:
    if gap["max"] is None:
        return f"{UNKNOWN} (no token was trained with the weights that sampled it)"
    return f"max {gap['max']:.1e} between rollout and trainer"


def _step_split(step_ms: Mapping[str, float | None]) -> str:
    parts = " · ".join(f"{name} {number(step_ms[name], '.1f')}" for name in (*STEP_PARTS, "other"))
    return f"{number(step_ms['total'], '.1f')} ms = {parts} (rollout in parallel: {number(step_ms['rollout'], '.1f')})"


def _ledger(ledger: Mapping[str, Any]) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in ledger["dropped"].items())
    dropped = sum(ledger["dropped"].values())
    counts = [
        f"{ledger['issued']:,} issued",
        f"{ledger['trained']:,} trained",
        f"{dropped:,} dropped" + (f" ({reasons})" if reasons else ""),
        f"{ledger['lost']:,} lost",
        f"{ledger['trained_twice']:,} trained twice",
    ]
    return " · ".join(counts)


def _modality(modality: Mapping[str, Any]) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in modality["dropped"].items())
    staleness = sum(int(steps) * count for steps, count in modality["staleness"].items()) / max(1, modality["trained"])
    return (
        f"{modality['issued']:,} issued ({number(modality['issued_share'], '.1%')}) · "
        f"{modality['trained']:,} trained ({number(modality['trained_share'], '.1%')}) · "
        f"{sum(modality['dropped'].values()):,} dropped{f' ({reasons})' if reasons else ''} · "
        f"reward {number(modality['reward'], '.3f')} · staleness {staleness:.2f} · "
        f"encode {number(modality['encode_ms'], '.1f')} ms · prefill {number(modality['prefill_ms'], '.1f')} ms"
    )


def _result_lines(run_dir: Path) -> Iterator[Text]:
    """Yields one line for each result file. Lines are not wrapped, because users copy or click paths."""
    shown = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
    width = max(len(label) for label, _ in RESULT_FILES)
    for label, name in RESULT_FILES:
        if (run_dir / name).exists():
            yield Text.assemble((f"{label:<{width}}  ", "dim"), str(shown / name))


def _answer(answer: Answer) -> Text:
    return Text.assemble(("✓ ", "green") if answer["exact"] else ("✗ ", "red"), _cell(answer["response"]))


def _cell(value: TextCell) -> Text:
    """Returns one line of at most `CELL_WIDTH` characters: the end of the text, where an answer usually is."""
    flat = " ".join(str(value).split())
    return Text(flat if len(flat) <= CELL_WIDTH else "… " + flat[2 - CELL_WIDTH :])


# -- Curves ------------------------------------------------------------------------------------------------------------
BLUE, ORANGE, GREY = "#1f5fa8", "#d9660a", "#5a5a5a"


_BACKEND = "MPLBACKEND"


def draw_picture(draw: Callable[[], Path | None]) -> tuple[Path | None, str | None]:
    """Calls ``draw``, which draws a picture with `picture_figure`. Returns the picture's path, and None as the error.

    If drawing fails, returns None and the text of the error, because the picture is optional.
    """
    try:
        return draw(), None
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # matplotlib, its settings, its fonts, the disk
        return None, f"{type(error).__name__}: {error}"


def picture_figure(**settings: Any) -> Figure:
    """Returns an empty figure that needs no display. ``settings`` are the arguments of matplotlib's Figure.

    A notebook exports its MPLBACKEND to each command, and the package of that backend may be missing here. So
    matplotlib is imported without the variable. Afterwards the backend is set for the user's code if its package
    exists.
    """
    if "matplotlib" not in sys.modules and (chosen := os.environ.pop(_BACKEND, None)) is not None:
        try:
            import matplotlib

            try:
                matplotlib.rcParams["backend"] = chosen
            except ValueError as error:
                print(f"relax: {_BACKEND}={chosen} is ignored: {error}", file=sys.stderr)
        finally:
            os.environ[_BACKEND] = chosen
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(**settings)
    FigureCanvasAgg(figure)
    return figure


def plot_curves(records: Iterable[MetricRecord], path: Path) -> Path:
    """Plots two metrics over train steps, for training and held-out prompts. Returns ``path``.

    The metrics are the reward and the share of exact answers; for an algorithm on data rows, the loss and another
    metric.

    The picture is a PNG of 1320 x 528 pixels. Raises ValueError if no train step and no evaluation was recorded.
    """
    held = without_undone(records)
    training, evaluation = by_step(held, ACTOR), by_step(held, EVAL)
    if not training and not evaluation:
        raise ValueError(f"{path}: there is nothing to draw, because no train step was recorded")
    figure = picture_figure(figsize=(11, 4.4), dpi=120)
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # only after `picture_figure` has imported matplotlib

    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    axes = figure.subplots(1, 2)
    names, held_out = {"reward": "mean reward", "exact": "share of exact answers"}, "held-out prompts, greedy"
    if not any("reward" in values for values in (*training.values(), *evaluation.values())):
        other = next(
            (name for values in evaluation.values() for name in values if name in _OFFLINE_CURVES), "grad_norm"
        )
        names, held_out = {"loss": "loss", other: other.replace("_", " ")}, "held-out rows"
    for axis, (name, title) in zip(axes, names.items(), strict=True):
        curve = _points(training, name)
        if not curve[0]:
            curve = _points(training, f"algorithm/{name}")
        _draw(axis, training=curve, evaluation=_points(evaluation, name), held_out=held_out)
        axis.set_title(title, loc="left", fontsize=13, fontweight="bold")
    shadow = _points(evaluation, "shadow")
    if shadow[0]:
        axes[1].plot(*shadow, color=GREY, marker="x", linestyle=":", label="held-out, by reward.shadow")
        axes[1].legend(frameon=False, fontsize=10, loc="best")
    if "exact" in names:
        axes[1].set_ylim(-0.04, 1.04)
    figure.savefig(path)
    return path


_OFFLINE_CURVES = ("preference_accuracy", "surprisal")  # metrics of evaluations on data rows, the first is drawn


def _points(values: dict[int, dict[str, float]], name: str) -> tuple[list[int], list[float]]:
    steps = [step for step in values if name in values[step]]
    return steps, [values[step][name] for step in steps]


def _draw(
    axis: Axes,
    *,
    training: tuple[list[int], list[float]],
    evaluation: tuple[list[int], list[float]],
    held_out: str,
) -> None:
    from matplotlib.ticker import MaxNLocator

    steps, values = training
    if steps:
        window = max(1, len(steps) // 25)
        axis.plot(steps, values, color=BLUE, alpha=0.3 if window > 1 else 1.0, linewidth=1.0)
        if window > 1:
            axis.plot(
                steps,
                _moving_mean(values, window),
                color=BLUE,
                linewidth=2.2,
                label=f"training, mean of {window} steps",
            )
        else:
            axis.lines[-1].set_label("training")
    steps, values = evaluation
    if steps:
        style: dict[str, Any] = {"color": ORANGE, "marker": "o", "markersize": 6, "linewidth": 1.2, "linestyle": "--"}
        axis.plot(steps, values, label=held_out, **style)
    axis.set_xlabel("train step", fontsize=11, color=GREY)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.tick_params(labelsize=10, colors=GREY)
    axis.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    if axis.lines:
        axis.legend(frameon=False, fontsize=10, loc="best")


def _moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean of the ``window`` values around each value. The window is shorter at the ends."""
    before, after = window // 2, window - window // 2
    return [fmean(values[max(0, index - before) : index + after]) for index in range(len(values))]
