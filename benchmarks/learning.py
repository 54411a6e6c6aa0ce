"""Tests whether runs learn: trains tiny models on several seeds, with controls that must not learn.

    python -m benchmarks.learning [--suite demo see episodes agents] [--seeds 3] [--only NAME …] [--results FILE]
                                  [--curves SVG] [key=value …]

Each row of the table is one run. ``first`` and ``last`` are the shares of held-out questions that greedy answers solve
in the first and the last evaluation, also by reward part and evaluation set. ``fall`` is the largest drop of an
evaluation below the best earlier evaluation. ``sampled`` is the share of exact training episodes, in the first and in
the last ten steps. A control replaces the data, the reward or the environment, so its model cannot learn. The exit code
is 1 if a run misses its bounds. With ``--results``, the benchmark appends each finished run to the file and does not
repeat runs in the file. ``--curves`` draws the sampled shares of the file.

- ``demo``: reverse digits.
- ``see``: vision and audio models (data=see, data=four_modalities; chance 0.25). The case "kills" sends SIGKILL to an
  encode worker, the engine, the rollout and the trainer, and then requires an exact ledger file.
- ``episodes``: games and tools of several turns.
- ``agents``: judges and programs with the ``openai`` client. ``judge`` is the judge's share of right verdicts on
  held-out pairs before the first step (benchmarks/taught_models.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import FinishedRun, Metrics, run_relax
from benchmarks.taught_models import (
    TASKS,
    judge_arguments,
    judge_folder,
    policy_folder,
    write_known_verdicts,
    write_rows,
)
from relax_core.observe.event_log import read_metrics
from tests.integration.live_run import ENGINE, ROLLOUT, LiveRun

HERE = Path(__file__).parent
DEADLINE_S = 3600.0
WINDOW = 50  # train steps in a moving average
KILLS = {2: "relax_core.data.media.encode_worker_main", 10: ENGINE, 25: ROLLOUT, 45: "ray::PolicyTrainer"}
SGLANG_PYTHON = Path(".venv-sglang/bin/python")
Words = Callable[[Path, int], Sequence[str]]  # (folder of a run's files, seed) → overrides of the run
Bounds = Mapping[str, tuple[float, float]]  # metric → minimum and maximum allowed value


@dataclass(frozen=True, kw_only=True)
class Case:
    """Defines one kind of run.

    ``bounds`` limit the metrics of the run. With ``like``, the last evaluation may be at most ``within`` below the last
    evaluation of the case ``like`` with the same seed. ``all_seeds`` is False for a kind that runs once. ``may_miss``
    is the number of seeds that may miss the bounds. ``needs`` is a file: without it the kind is left out.
    """

    words: Sequence[str] | Words
    bounds: Bounds = field(default_factory=dict)
    like: str = ""
    within: float = 0.0
    all_seeds: bool = True
    may_miss: int = 0
    kills: bool = False
    needs: Path | None = None

    def words_of(self, folder: Path, seed: int) -> list[str]:
        """Returns the overrides of a run that writes its files into ``folder``."""
        return [*(self.words(folder, seed) if callable(self.words) else self.words), f"seed={seed}"]


def least(value: float) -> tuple[float, float]:
    return (value, float("inf"))


def most(value: float) -> tuple[float, float]:
    return (float("-inf"), value)


# -- the kinds of runs ------------------------------------------------------------------------------------------------
KEPT = {"last": least(0.97), "fall": most(0.03)}
DEMO = {
    "demo": Case(words=(), bounds=KEPT),
    "demo, shuffled reward": Case(
        words=("reward=plugin", f"reward.name={HERE / 'shuffled_reward.py'}"),
        bounds={"last": most(0.5)},
        all_seeds=False,
    ),
}

# With only 256 held-out rows, one reward part in twenty would exceed its bound by chance.
MORE_ROWS = ("data.eval_size=1024", "eval.rows=1024")
SEE_PARTS = {f"{part}/last": least(0.9) for part in ("colour", "direction", "word")}
SEEN = {"last": least(0.95)} | SEE_PARTS
HEARD = SEEN | {"tone/last": least(0.9)}
PART_OF_KIND = {"image": "colour", "video": "direction", "audio": "tone"}
MATCH = "tone_of_picture"
VL, VL_MOE = ("model=tiny_qwen3_vl", "data=see"), ("model=tiny_qwen3_vl_moe", "data=see", "algo.routing_replay=true")
HYBRID = ("model=tiny_qwen3_5", "data=see")
HYBRID_MOE = ("model=tiny_qwen3_5_moe", "data=see", "algo.routing_replay=true")
OMNI = ("model=tiny_qwen3_omni", "data=four_modalities", "algo.routing_replay=true")


def exchanged(words: Sequence[str], task: str, bounds: Bounds, *kinds: str) -> Case:
    """Returns a control: for these media kinds, each row has the media of a random row."""
    blind = {f"{PART_OF_KIND[kind]}/last": most(0.33) for kind in kinds}
    known = {name: bound for name, bound in bounds.items() if name != "last"}
    return Case(words=(*words, f"data.task={task}", *MORE_ROWS), bounds=known | blind, all_seeds=False)


def matched(*kinds: str) -> Case:
    """Returns the task to decide whether a tone matches a picture (chance 0.5), or the control of this task."""
    task = "_".join((MATCH, *kinds, "exchanged")) if kinds else MATCH
    words = (*OMNI, f"data.task={task}", f"model.task={MATCH}", *MORE_ROWS)
    if kinds:
        return Case(words=words, bounds={"last": most(0.6)}, all_seeds=False)
    return Case(words=words, bounds={"last": least(0.9)}, may_miss=1)


SEE = {
    "dense, async": Case(words=VL, bounds=SEEN),
    "dense, colocate": Case(words=(*VL, "mode=colocate"), bounds=SEEN | {"first": most(0.65)}, all_seeds=False),
    "experts, async": Case(words=VL_MOE, bounds=SEEN),
    "dense, exchanged": exchanged(VL, "see_exchanged", SEEN, "image", "video"),
    "experts, exchanged": exchanged(VL_MOE, "see_exchanged", SEEN, "image", "video"),
    "dense, kills": Case(
        words=(*VL, "modality.workers=1", "run.save_every=20"), bounds=SEEN, all_seeds=False, kills=True
    ),
    "dense, SGLang": Case(
        words=(*VL, "engine=sglang", f"engine.python={SGLANG_PYTHON}"),
        bounds=SEEN,
        all_seeds=False,
        needs=SGLANG_PYTHON,
    ),
    "tower frozen": Case(words=(*VL, "model.freeze=[vision,projector]"), all_seeds=False),
    "only the tower": Case(words=(*VL, "model.freeze=[language]"), all_seeds=False),
    "hybrid, async": Case(words=HYBRID, bounds=SEEN),
    "hybrid experts, async": Case(words=HYBRID_MOE, bounds=SEEN),
    "four kinds, async": Case(words=OMNI, bounds=HEARD),
    "four kinds, TP2 EP2": Case(words=(*OMNI, "parallel=tp2_ep2"), bounds=HEARD, all_seeds=False),
    **{
        f"four kinds, no {PART_OF_KIND[kind]}": exchanged(OMNI, f"four_modalities_{kind}_exchanged", HEARD, kind)
        for kind in PART_OF_KIND
    },
    "four kinds, words only": exchanged(OMNI, "four_modalities_exchanged", HEARD, *PART_OF_KIND),
    "do they match?": matched(),
    "match, no picture": matched("image"),
    "match, no tone": matched("audio"),
}

GUESS, PRODUCT = "experiment=number_guess", "experiment=calculator"


def no_use(*words: str, at_most: float) -> Case:
    """Returns a control with an environment that gives no useful information."""
    return Case(words=words, bounds={"last": most(at_most), "sampled_last": most(at_most)}, all_seeds=False)


EPISODES = {
    "number_guess": Case(words=(GUESS,), bounds={"first": most(0.6), "last": least(0.9), "fall_of_window": most(0.05)}),
    "number_guess, random answers": no_use(GUESS, f"env.name={HERE / 'random_hints.py'}", at_most=0.48),
    "number_guess, one turn": no_use(GUESS, "env.max_turns=1", at_most=0.2),
    "number_guess by GiGPO": Case(words=(GUESS, "algo.credit=gigpo"), bounds={"gain": least(0.1)}),
    "number_guess by PPO": Case(words=(GUESS, "algo=ppo", "algo.group_size=16"), bounds={"gain": least(0.1)}),
    "frozen_lake": Case(words=("experiment=frozen_lake",), bounds={"gain": least(0.5)}),
    "calculator": Case(words=(PRODUCT,), bounds={"first": most(0.4), "last": least(0.95), "sampled_last": least(0.9)}),
    "calculator, no tool": no_use(PRODUCT, "env.tool=false", at_most=0.02),
    "calculator, random tool": no_use(PRODUCT, f"env.name={HERE / 'random_calculator.py'}", at_most=0.02),
}

RIGHT_VERDICTS = 0.98
TRAIN_ROWS, HELD_OUT_ROWS = 8192, 128


def judged(known: Path) -> list[str]:
    return [
        *("reward=plugin", f"reward.name={HERE / 'judged_digits.py'}", "rollout.min_p=0.1"),
        *(f"reward.check.path={known}", f"reward.check.min={RIGHT_VERDICTS}"),
    ]


def one_judge(*, shuffled: bool) -> Words:
    """Returns the overrides of a run on reverse_digits with GenRM. ``shuffled``: the judge sees wrong questions."""

    def words(folder: Path, seed: int) -> list[str]:
        write_known_verdicts(folder / "known.jsonl", {"rev": "main"})
        own = [f"reward.shuffled={str(shuffled).lower()}", "run.steps=120"]
        return [*judged(folder / "known.jsonl"), *judge_arguments("main", judge_folder("rev")), *own]

    return words


def two_judges(*, swapped: bool) -> Words:
    """Returns the overrides of a run on both tasks. Rows name their task's judge, with ``swapped`` the wrong judge."""

    def words(folder: Path, seed: int) -> list[str]:
        names = list(TASKS)
        own = dict(zip(names, names[::-1] if swapped else names, strict=True))
        write_known_verdicts(folder / "known.jsonl", {task: task for task in TASKS})
        write_rows(folder / "train.jsonl", own, rows=TRAIN_ROWS, seed=seed, held_out=False)
        for task in TASKS:
            write_rows(folder / f"{task}.jsonl", {task: own[task]}, rows=HELD_OUT_ROWS, seed=0, held_out=True)
        sets = ", ".join(f"{task}: {folder / f'{task}.jsonl'}" for task in TASKS)
        return [
            *judged(folder / "known.jsonl"),
            *(word for task in TASKS for word in judge_arguments(task, judge_folder(task))),
            *("reward.route=judge", "model=qwen3", "model.dtype=float32", f"model.path={policy_folder('both')}"),
            *("optimizer.lr=8e-4", "optimizer.beta2=0.999", "rollout.max_new_tokens=8"),  # as in the demo
            *("data=file", f"data.path={folder / 'train.jsonl'}", f"data.eval_path={folder / f'{names[0]}.jsonl'}"),
            f"eval.sets={{{sets}}}",
            # Without a right reward only the entropy bonus moves the policy. After 200 steps no judge can read its
            # texts.
            f"run.steps={200 if swapped else 300}",
        ]

    return words


def played(game: str, experiment: str) -> list[str]:
    """Returns the overrides of a run in which the program benchmarks/openai_agent.py plays the episodes."""
    own = [experiment, "env=agent", f"agent.command=python {HERE / 'openai_agent.py'} {game}"]
    return [*own, "agent.workers=8", "env.max_turns=3"]


def guesses(game: str) -> Words:
    """Returns the overrides of a run of the guessing game. The initial model was trained on the game's history."""

    def words(folder: Path, seed: int) -> list[str]:
        model = ["model=qwen3", "model.dtype=float32", f"model.path={policy_folder('guess')}", "optimizer.beta2=0.999"]
        # The initial model uses the hints in half of its guesses, so fewer steps and less entropy suffice.
        return [*played(game, GUESS), *model, "run.steps=200", "algo.entropy_coef=0.03"]

    return words


EITHER = {f"{task}/last" for task in TASKS}
AGENTS = {
    "genrm": Case(words=one_judge(shuffled=False), bounds={"last": least(0.9)}),
    "genrm, shuffled questions": Case(words=one_judge(shuffled=True), bounds={"gain": (-0.1, 0.1)}, all_seeds=False),
    "two judges": Case(words=two_judges(swapped=False), bounds={name: least(0.85) for name in sorted(EITHER)}),
    "two judges, routes swapped": Case(
        words=two_judges(swapped=True), bounds={f"{task}/gain": most(0.1) for task in TASKS}, all_seeds=False
    ),
    "calculator, env": Case(words=(PRODUCT,)),
    "calculator, agent": Case(words=played("calculator", PRODUCT), like="calculator, env", within=0.03),
    "calculator, no tool, agent": Case(words=played("no_tool", PRODUCT), bounds={"last": most(0.02)}, all_seeds=False),
    "number_guess, env": Case(words=(GUESS,)),
    "number_guess, agent": Case(words=guesses("guess"), like="number_guess, env", within=0.05),
    "number_guess, random, agent": Case(words=guesses("random_guess"), bounds={"last": most(0.48)}, all_seeds=False),
}
SUITES: Mapping[str, Mapping[str, Case]] = {"demo": DEMO, "see": SEE, "episodes": EPISODES, "agents": AGENTS}
CASES = {name: case for suite in SUITES.values() for name, case in suite.items()}


# -- metrics ----------------------------------------------------------------------------------------------------------
def largest_fall(values: Sequence[float]) -> float:
    """Returns the maximum drop of a value below the best earlier value."""
    return max(best - value for best, value in zip(accumulate(values, max), values, strict=True))


def metrics_of(run: FinishedRun) -> Metrics:
    """Returns the metrics of a finished run."""
    summary, evaluations = run.summary, run.summary["eval"]
    held_out = [evaluation["exact"] for evaluation in evaluations]
    sampled = shares(run)
    width = min(WINDOW, len(sampled))
    means = [fmean(sampled[first : first + width]) for first in range(len(sampled) - width + 1)]
    found = {
        "first": held_out[0],
        "last": held_out[-1],
        "gain": held_out[-1] - held_out[0],
        "fall": largest_fall(held_out),
        "sampled_first": summary["exact"]["first"],
        "sampled_last": summary["exact"]["last"],
        "fall_of_window": max(means) - means[-1],
        "samples_per_s": summary["samples_per_s"],
        "wall_s": summary["wall_s"],
    }
    for name, last in evaluations[-1]["figures"].items():
        if name.endswith("/exact"):
            part, first = name.removesuffix("/exact"), evaluations[0]["figures"][name]
            found |= {f"{part}/first": first, f"{part}/last": last, f"{part}/gain": last - first}
    accuracy = [record.values["accuracy"] for record in run.records if record.source == "judge_check"]
    return found | ({"judge": accuracy[-1]} if accuracy else {})


def shares(run: FinishedRun) -> list[float]:
    """Returns the share of exact training episodes of each train step."""
    return [values["exact"] for _, values in sorted(run.steps().items())]


def missed(case: Case, figures: Metrics, *, like: float | None = None) -> list[str]:
    """Returns the bounds that a run misses. ``like`` is the last evaluation of the run for comparison."""
    bounds = dict(case.bounds)
    if like is not None:
        bounds["last"] = least(like - case.within)
    return [
        f"{name} {figures[name]:.3f} is not between {low:g} and {high:g}"
        for name, (low, high) in bounds.items()
        if not low <= figures[name] <= high
    ]


# -- runs -------------------------------------------------------------------------------------------------------------
def learn(case: Case, seed: int, more: Sequence[str]) -> tuple[Metrics, list[float]]:
    """Executes one run. Returns its metrics and the sampled share of each train step."""
    with TemporaryDirectory(prefix="relax-learning-") as scratch:
        folder = Path(scratch) / "run"
        words = [*case.words_of(Path(scratch), seed), *more]
        run = run_with_kills(folder, words) if case.kills else run_relax(folder, *words, deadline_s=DEADLINE_S)
    return metrics_of(run), shares(run)


def run_with_kills(folder: Path, words: Sequence[str]) -> FinishedRun:
    """Runs a training and kills its processes one by one. Raises AssertionError if the ledger's file is not exact."""
    with LiveRun(folder, *words) as live:
        for step, process in KILLS.items():
            live.wait_step(step)
            live.kill(process)
        finished = live.finish(deadline_s=DEADLINE_S)
    assert finished.code == 0, finished.output
    finished.assert_all_samples_accounted()
    return FinishedRun(summary=finished.summary, records=read_metrics(folder))


def read_results(file: Path | None) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Returns the finished runs in a results file, by name, seed and further overrides."""
    if file is None or not file.is_file():
        return {}
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {tuple(record["run"]): record for record in records}


def draw(results: Path, picture: Path) -> None:
    """Draws the sampled share over the train steps, with a panel for each kind of run and a line for each run."""
    from matplotlib.figure import Figure

    runs: dict[str, list[list[float]]] = defaultdict(list)
    for record in read_results(results).values():
        runs[record["run"][0]].append(record["shares"])
    columns = min(3, len(runs))
    figure = Figure(figsize=(4 * columns, 2.4 * -(-len(runs) // columns)), layout="constrained")
    panels = figure.subplots(-(-len(runs) // columns), columns, squeeze=False).flat
    for axes, (name, curves) in zip(panels, runs.items(), strict=False):
        axes.set_title(name, fontsize=9)
        axes.set_ylim(0.0, 1.0)
        for curve in curves:
            axes.plot([fmean(curve[max(0, step - 4) : step + 1]) for step in range(len(curve))], linewidth=1.0)
    figure.savefig(picture, dpi=80)


def command_line(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments. ``only`` lists the names of the chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=["demo"])
    parser.add_argument("--only", nargs="+", choices=list(CASES), help="only these kinds of runs, from any suite")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, help="file of finished runs, one JSON record a line")
    parser.add_argument("--curves", type=Path, help="plot of the runs in --results")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    given = parser.parse_args(words)
    given.only = given.only or [name for suite in given.suite for name in SUITES[suite]]
    return given


def line(name: str, seed: int, figures: Metrics) -> str:
    """Returns one row of the table."""
    pairs = [("held-out", "first", "last"), ("sampled", "sampled_first", "sampled_last")]
    pairs += [
        (figure[: -len("/last")], f"{figure[:-5]}/first", figure) for figure in figures if figure.endswith("/last")
    ]
    shown = "  ".join(f"{title} {figures[first]:.3f} → {figures[last]:.3f}" for title, first, last in pairs)
    judge = f"  judge {figures['judge']:.3f}" if "judge" in figures else ""
    return f"{name:30}{seed:3}  {shown}  fall {figures['fall']:.3f}{judge}  {figures['wall_s']:.0f} s"


def main() -> int:
    given = command_line()
    finished, wrong, ends = read_results(given.results), list[str](), dict[tuple[str, int], float]()
    for name in given.only:
        case, bad = CASES[name], []
        if case.needs is not None and not case.needs.exists():
            print(f"{name}: not run, because there is no {case.needs} (make sglang-cpu)")
            continue
        for seed in range(given.seeds if case.all_seeds else 1):
            key = (name, seed, *given.overrides)
            if key in finished:
                figures = finished[key]["figures"]
            else:
                figures, curve = learn(case, seed, given.overrides)
                if given.results is not None:
                    with given.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"run": key, "figures": figures, "shares": curve}) + "\n")
            ends[name, seed] = figures["last"]
            print(line(name, seed, figures), flush=True)
            bad += [f"{name}, seed {seed}: {word}" for word in missed(case, figures, like=ends.get((case.like, seed)))]
        seeds_missed = len({missed_line.split(":")[0] for missed_line in bad})
        wrong += bad if seeds_missed > min(case.may_miss, given.seeds - 1) else []
    if given.curves is not None and given.results is not None:
        draw(given.results, given.curves)
    print("unexpected:\n" + "\n".join(wrong) if wrong else "every run learns its task, and no control does")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
