"""Plots the reward and the accuracy of a run as curves.png."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from relax_core.observe.event_log import ACTOR, EVAL, MetricRecord, by_step, without_undone

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES_FILE = "curves.png"
BLUE, ORANGE, GREY = "#1f5fa8", "#d9660a", "#5a5a5a"


_BACKEND = "MPLBACKEND"


def draw_picture(draw: Callable[[], Path | None]) -> tuple[Path | None, str | None]:
    """Calls ``draw``, which makes a picture with `picture_figure`, and returns its path.

    A picture is an optional product: if it cannot be drawn or written, the result is None and the reason.
    """
    try:
        return draw(), None
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # matplotlib, its settings, its fonts, the disk
        return None, f"{type(error).__name__}: {error}"


def picture_figure(**settings: Any) -> Figure:
    """Returns an empty figure that is drawn without a screen; ``settings`` are those of matplotlib's Figure.

    A notebook exports its own MPLBACKEND to each command, and the package behind it may be missing here. So matplotlib
    is imported without that variable, and a backend that exists is chosen afterwards for the code of the user.
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
    """Plots reward and share of exact answers over train steps, in training and on held-out prompts; returns ``path``.

    The picture is a PNG of 1320 x 528 pixels. Raises ValueError if no train step and no evaluation was recorded.
    """
    held = without_undone(records)
    training, evaluation = by_step(held, ACTOR), by_step(held, EVAL)
    if not training and not evaluation:
        raise ValueError(f"{path}: there is nothing to draw, because no train step was recorded")
    figure = picture_figure(figsize=(11, 4.4), dpi=120)
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # behind the import that `picture_figure` guards

    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    axes = figure.subplots(1, 2)
    for axis, name, title in zip(axes, ("reward", "exact"), ("mean reward", "share of exact answers"), strict=True):
        _draw(axis, training=_points(training, name), evaluation=_points(evaluation, name))
        axis.set_title(title, loc="left", fontsize=13, fontweight="bold")
    axes[1].set_ylim(-0.04, 1.04)
    figure.savefig(path)
    return path


def _points(values: dict[int, dict[str, float]], name: str) -> tuple[list[int], list[float]]:
    steps = [step for step in values if name in values[step]]
    return steps, [values[step][name] for step in steps]


def _draw(axis: Axes, *, training: tuple[list[int], list[float]], evaluation: tuple[list[int], list[float]]) -> None:
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
        axis.plot(steps, values, label="held-out prompts, greedy", **style)
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
    """Returns the mean of the ``window`` values around each value; at the ends, of fewer values."""
    before, after = window // 2, window - window // 2
    return [fmean(values[max(0, index - before) : index + after]) for index in range(len(values))]
