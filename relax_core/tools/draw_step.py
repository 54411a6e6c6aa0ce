"""Draws docs/one_step.svg: the token tree of a small group, its arrays, and its path through one train step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from relax_core.contracts.tree import NOT_SAMPLED, Episode, TokenTree, Turn, check_tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOKENS = ("12", "+", "30", "=", "42", "stop", "32", "stop", "no", ",", "again", "42", "stop")
INK, LINE, PROMPT, OBSERVED = "#1f2933", "#7b8794", "#e4e7eb", "#fdf3d7"
BY_VERSION = {7: "#cfe3fa", 8: "#cdeed8"}
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "relax",
    "font.family": "sans-serif",
    "font.size": 9,
}
METADATA = {"Date": None, "Creator": None}  # without these settings, each written file has different bytes
WIDTH, HEIGHT = 11.0, 7.3  # in inches; the axes have the same units


class Stop(NamedTuple):
    """Describes one station on the group's path: the role, the role's file, and its task."""

    name: str
    file: str
    does: str


WAY = (
    Stop("rollout", "rollout/rollout_loop.py", "samples, scores,\nbuilds the tree"),
    Stop("bus", "bus/replay_buffer.py", "keeps complete groups,\nrecords every episode"),
    Stop("trainer", "train/policy_backend.py", "packs trees, loss,\ngradient, update"),
    Stop("weights", "weights/version_file.py", "one file with digests\nfor each version"),
)


def small_group() -> TokenTree:
    """Returns a group of one prompt with two answers. The second has two turns, sampled by two weight versions."""
    versions = np.array([*[NOT_SAMPLED] * 4, 7, 7, 7, 7, *[NOT_SAMPLED] * 3, 8, 8], dtype=np.int32)
    rows = len(versions)
    right = Episode("g00000000.0", [5], 1.0, {}, [Turn(4, 6, "engine-0", [(7, 2)], "stop")], "stop")
    turns = [Turn(6, 8, "engine-0", [(7, 2)], "stop"), Turn(11, 13, "engine-0", [(8, 2)], "stop")]
    tree = TokenTree(
        group_uid="g00000000",
        token_ids=np.arange(rows, dtype=np.int32),
        end=np.array([rows] * 4 + [6] * 2 + [rows] * 7, dtype=np.int32),
        loss_mask=versions >= 0,
        logprobs=np.where(versions >= 0, -0.5, 0.0).astype(np.float32),
        versions=versions,
        episodes=[right, Episode("g00000000.1", [12], 0.5, {}, turns, "stop")],
    )
    check_tree(tree)
    return tree


def draw_step(path: Path) -> None:
    """Writes the picture to ``path`` as SVG. Its bytes depend only on this file and matplotlib's version."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tree = small_group()
    with matplotlib.rc_context(SETTINGS):
        figure = pyplot.figure(figsize=(WIDTH, HEIGHT), facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
        axes.axis("off")
        _draw_tree(axes, tree)
        _draw_arrays(axes, tree)
        _draw_way(axes)
        figure.savefig(path, format="svg", metadata=METADATA)
        pyplot.close(figure)


def _box(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    """Draws a box around its centre."""
    from matplotlib.patches import FancyBboxPatch

    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(
        FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=colour, edgecolor=LINE, linewidth=0.8)
    )


def _arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], *, bend: float = 0.0) -> None:
    arrow = {"arrowstyle": "-|>", "color": LINE, "linewidth": 1.2, "connectionstyle": f"arc3,rad={bend}"}
    axes.annotate("", xy=stop, xytext=start, arrowprops=arrow)


def _text(axes: Axes, x: float, y: float, text: str, *, align: str = "center", **style: Any) -> None:
    axes.text(x, y, text, **{"ha": align, "va": "center", "color": INK, **style})


def _colour(tree: TokenTree, row: int) -> str:
    version = int(tree.versions[row])
    if version >= 0:
        return BY_VERSION[version]
    return PROMPT if tree.end[row] == tree.rows and row < tree.runs.stop[0] else OBSERVED


def _draw_tree(axes: Axes, tree: TokenTree) -> None:
    """Draws the tree. The x position is the row's position in its path. Each answer has a separate height."""
    _text(axes, 0.3, 7.0, "A group is a token tree: each row is one token, computed once", align="left", weight="bold")
    runs = tree.runs
    heights = {0: 5.9, 1: 6.4, 2: 5.4}
    positions, parents = runs.positions(), runs.parents()
    run_of = runs.of_rows(np.arange(tree.rows))

    def point(row: int) -> tuple[float, float]:
        return 0.75 + 0.72 * float(positions[row]), heights[int(run_of[row])]

    for row in range(tree.rows):
        x, y = point(row)
        if parents[row] >= 0:
            from_x, from_y = point(int(parents[row]))
            axes.plot([from_x + 0.27, x - 0.27], [from_y, y], color=LINE, linewidth=1.0, zorder=0)
        _box(axes, x, y, 0.54, 0.34, _colour(tree, row))
        _text(axes, x, y, TOKENS[row])
        _text(axes, x, y - 0.27, str(row), size=6.5, color=LINE)
    _text(axes, 0.4, 6.32, "prompt: the trunk", align="left", size=8)
    for episode, note in zip(tree.episodes, ("one turn", "two turns"), strict=True):
        x, y = point(episode.leaves[0])
        _text(axes, x + 0.45, y + 0.07, f"episode {episode.uid}", align="left", size=8)
        _text(axes, x + 0.45, y - 0.11, f"{note}; reward {episode.reward}", align="left", size=8)


def _draw_arrays(axes: Axes, tree: TokenTree) -> None:
    """Draws the flat arrays with one column per tree row."""
    _text(
        axes,
        0.3,
        4.85,
        "The same tree as flat arrays, which every process reads without a copy",
        align="left",
        weight="bold",
    )
    left, step, top, height = 1.85, 0.62, 4.5, 0.27
    member = [["", ""] for _ in range(tree.rows)]
    for episode, row in zip(*(array.tolist() for array in tree.tokens), strict=True):
        member[row][episode] = str(episode)
    lines: list[tuple[str, Sequence[str]]] = [
        ("row", [str(row) for row in range(tree.rows)]),
        ("token_ids", TOKENS),
        ("end", [str(end) for end in tree.end.tolist()]),
        ("loss_mask", [str(int(trained)) for trained in tree.loss_mask.tolist()]),
        ("versions", [str(version).replace("-", "−") for version in tree.versions.tolist()]),
        ("logprobs", [f"−{-value:.1f}" if value else "0" for value in tree.logprobs.tolist()]),
        ("episode", ["".join(episodes) for episodes in member]),
    ]
    for number, (name, cells) in enumerate(lines):
        y = top - number * height
        _text(axes, left - 0.4, y, name, align="right", size=8, weight="bold" if number else "normal")
        for row, cell in enumerate(cells):
            if number:
                _cell(axes, left + row * step, y, step, height, _colour(tree, row))
            _text(axes, left + row * step, y, cell, size=8, color=INK if number else LINE)
    seen = "Row k is visible to row q if k ≤ q < end[k]. Tokens are shown as text."
    colours = "Grey: prompt. Yellow: observed. Blue and green: sampled by weights 7 and 8."
    _text(axes, 0.3, top - len(lines) * height - 0.04, f"{seen} {colours}", align="left", size=8)


def _cell(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    """Draws a table cell around its centre."""
    from matplotlib.patches import Rectangle

    corner = (x - width / 2, y - height / 2)
    axes.add_patch(Rectangle(corner, width, height, facecolor=colour, edgecolor="white", linewidth=1.0))


def _draw_way(axes: Axes) -> None:
    """Draws the stations from left to right, and the path back from the weights to the rollout's engine."""
    _text(axes, 0.3, 2.2, "Its way in one train step t", align="left", weight="bold")
    width, gap, y = 2.0, 0.72, 1.35
    centres = [0.35 + width / 2 + number * (width + gap) for number in range(len(WAY))]
    carried = ("columns of bytes", "a lease", "weights t + 1")
    for x, stop in zip(centres, WAY, strict=True):
        _box(axes, x, y, width, 1.0, "white")
        _text(axes, x, y + 0.32, stop.name, weight="bold")
        _text(axes, x, y + 0.08, stop.file, size=7.5, family="monospace", color=LINE)
        _text(axes, x, y - 0.24, stop.does, size=8)
    for first, second, what in zip(centres, centres[1:], carried, strict=False):
        _arrow(axes, (first + width / 2, y), (second - width / 2, y))
        _text(axes, (first + second) / 2, y + 0.63, what, size=8)
    low, behind = 0.42, y - 0.5
    axes.plot([centres[-1], centres[-1], centres[0]], [behind, low, low], color=LINE, linewidth=1.2)
    _arrow(axes, (centres[0], low), (centres[0], behind))
    note = "the engine compares the digests, then samples with weights t + 1"
    _text(axes, WIDTH / 2, low - 0.16, note, size=8)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m relax_core.tools.draw_step", description=__doc__)
    parser.add_argument("path", type=Path, help="the SVG to write, docs/one_step.svg in the repository")
    draw_step(parser.parse_args(arguments).path)


if __name__ == "__main__":
    main()
