"""Measures what slow tools, env workers and the sandbox cost, or shows what tiny models learn in several turns.

    python -m benchmarks.episodes [--rounds 3] [--steps 12]
    python -m benchmarks.episodes --learn [--seeds 3] [--only NAME …] [--results FILE] [--curves SVG] [key=value …]

Without ``--learn`` it prints the figures of `benchmarks.episode_times`. With it, each row of the table is one whole
run. "greedy" is the share of held-out games that greedy answers win, at the start and at the end; "sampled"
is that of the training episodes, over the first and the last ten steps. In a control the turns are of no use: the
environment answers at random, there is one turn, or there is no tool. The exit code is 1 if a run misses its bounds.
One run follows the other. With ``--results``, each finished run is added to the file, and a run that the file has is
not repeated; ``--curves`` draws the sampled share of all runs of that file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.demo_seeds import LEARNING_DEADLINE_S, run_demo
from benchmarks.episode_times import measure
from relax_core.observe.service.sinks import read_metrics

HERE = Path(__file__).parent
STEPS_OF_A_MEAN = 50
STEPS_OF_A_POINT = 5  # of a curve
LARGEST_FALL = 0.05  # of the last 50 steps from the best 50
Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Is one kind of run.

    ``start`` is the most that greedy answers may win at the start, ``goal`` the least at the end, and ``gain`` the
    least that the end is above the start. ``bound`` is the most that a control may win at the end, greedy and sampled.
    ``sampled`` is the least share of the last ten steps.
    """

    words: tuple[str, ...]
    start: float = 1.0
    goal: float = 0.0
    gain: float = -1.0
    sampled: float = 0.0
    bound: float = 1.0
    no_fall: bool = False
    all_seeds: bool = True


_GUESS, _PRODUCT = "experiment=number_guess", "experiment=calculator"
_PPO = ("algo.group_size=16",)
CASES = {
    "number_guess": Case(words=(_GUESS,), start=0.6, goal=0.9, no_fall=True),
    "number_guess, random answers": Case(
        words=(_GUESS, f"env.name={HERE / 'random_hints.py'}"), bound=0.48, all_seeds=False
    ),
    "number_guess, one turn": Case(words=(_GUESS, "env.max_turns=1"), bound=0.2, all_seeds=False),
    "number_guess by GiGPO": Case(words=(_GUESS, "algo.credit=gigpo"), gain=0.1),
    "number_guess by PPO": Case(words=(_GUESS, "algo=ppo", *_PPO), gain=0.1),
    "frozen_lake": Case(words=("experiment=frozen_lake",), gain=0.5),
    "calculator": Case(words=(_PRODUCT,), start=0.4, goal=0.95, sampled=0.9),
    "calculator, no tool": Case(words=(_PRODUCT, "env.tool=false"), bound=0.02, all_seeds=False),
    "calculator, random tool": Case(
        words=(_PRODUCT, f"env.name={HERE / 'random_calculator.py'}"), bound=0.02, all_seeds=False
    ),
}


def command_line(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learn", action="store_true", help="train, and measure no times")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way with slow tools is measured")
    parser.add_argument("--steps", type=int, default=12, help="train steps of each of these measurements")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="which kinds of runs")
    parser.add_argument("--results", type=Path, default=None, help="file of finished runs, one JSON record a line")
    parser.add_argument("--curves", type=Path, default=None, help="picture of the runs in --results")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    return parser.parse_args(words)


def main() -> int:
    arguments = command_line()
    if not arguments.learn:
        measure(rounds=arguments.rounds, steps=arguments.steps)
        return 0
    finished, wrong = _finished(arguments.results), []
    print(f"{'run':30}{'seed':>5}{'greedy':>16}{'sampled':>16}{'last 50':>9}{'best 50':>9}{'wall s':>8}", flush=True)
    with tempfile.TemporaryDirectory(prefix="episodes-") as scratch:
        for name in arguments.only:
            for seed in range(arguments.seeds if CASES[name].all_seeds else 1):
                words = (*CASES[name].words, *arguments.overrides, f"seed={seed}")
                figures = finished.get(words)
                if figures is None:
                    folder = Path(scratch) / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
                    summary, won = run_demo(folder, words, deadline_s=LEARNING_DEADLINE_S), shares_won(folder)
                    figures = figures_of(summary, won)
                    if arguments.results is not None:
                        record = {"name": name, "words": words, "figures": figures, "won": won}
                        with arguments.results.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(record) + "\n")
                print(_line(name, seed, figures), flush=True)
                if not as_expected(CASES[name], figures):
                    wrong.append(f"{name}, seed {seed}")
    if arguments.curves is not None and arguments.results is not None:
        draw(arguments.results, arguments.curves)
    print(f"unexpected: {'; '.join(wrong)}" if wrong else "every run learns its task, and no control does")
    return 1 if wrong else 0


def _records(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def _finished(results: Path | None) -> dict[tuple[str, ...], Figures]:
    if results is None or not results.is_file():
        return {}
    return {tuple(record["words"]): record["figures"] for record in _records(results)}


def draw(results: Path, picture: Path) -> None:
    """Draws the share of sampled games that are won over the train steps: a panel for each kind, a line for a run."""
    from matplotlib.figure import Figure

    runs: dict[str, list[list[float]]] = defaultdict(list)
    for record in _records(results):
        runs[record["name"]].append(record["won"])
    columns = 3
    rows = -(-len(runs) // columns)
    figure = Figure(figsize=(4 * columns, 2.4 * rows), layout="constrained")
    for axes, (name, curves) in zip(figure.subplots(rows, columns, squeeze=False).flat, runs.items(), strict=False):
        axes.set_title(name, fontsize=9)
        axes.set_ylim(0.0, 1.0)
        for won in curves:
            means = [fmean(won[max(0, step - STEPS_OF_A_POINT + 1) : step + 1]) for step in range(len(won))]
            axes.plot(means, linewidth=1.0)
    figure.savefig(picture, dpi=80)


def shares_won(folder: Path) -> list[float]:
    """Returns the share of won games of each train step."""
    return [record.values["exact"] for record in read_metrics(folder) if record.source == "actor"]


def figures_of(summary: Mapping[str, Any], won: Sequence[float]) -> Figures:
    """Returns the figures of a finished run from its summary and `shares_won`."""
    width = min(STEPS_OF_A_MEAN, len(won))
    means = [fmean(won[first : first + width]) for first in range(len(won) - width + 1)]
    return {
        "greedy_first": summary["eval"][0]["exact"],
        "greedy_last": summary["eval"][-1]["exact"],
        "sampled_first": summary["exact"]["first"],
        "sampled_last": summary["exact"]["last"],
        "last_50": means[-1],
        "best_50": max(means),
        "wall_s": summary["wall_s"],
    }


def as_expected(case: Case, figures: Figures) -> bool:
    """Returns whether a run is within its bounds."""
    greedy, sampled = figures["greedy_last"], figures["sampled_last"]
    return (
        figures["greedy_first"] <= case.start
        and greedy >= case.goal
        and greedy - figures["greedy_first"] >= case.gain
        and sampled >= case.sampled
        and max(greedy, sampled) <= case.bound
        and (not case.no_fall or figures["best_50"] - figures["last_50"] <= LARGEST_FALL)
    )


def _line(name: str, seed: int, figures: Figures) -> str:
    greedy = f"{figures['greedy_first']:.3f} → {figures['greedy_last']:.3f}".rjust(16)
    sampled = f"{figures['sampled_first']:.3f} → {figures['sampled_last']:.3f}".rjust(16)
    means = f"{figures['last_50']:9.3f}{figures['best_50']:9.3f}"
    return f"{name:30}{seed:5}{greedy}{sampled}{means}{figures['wall_s']:8.0f}"


if __name__ == "__main__":
    sys.exit(main())
