"""Measures what rewards, judges and the endpoint of agents cost, or shows what tiny models learn from them.

    python -m benchmarks.agents [--rounds 3] [--steps 24] [--only NAME …]
    python -m benchmarks.agents --learn [--seeds 3] [--only NAME …] [--results FILE] [key=value …]

Without ``--learn`` it prints the figures of `benchmarks.agent_times`. With it, each row of the table is one whole run.
"greedy" is the share of held-out questions that greedy answers solve, at the start and at the end; of two tasks it is
the worse one. "sampled" is the share of the training episodes, over the first and the last ten steps. Both are by the
true answer, which no judge sees. "judge" is the share of right verdicts on held-out pairs before the first step. In a
control the judge sees another question, or a row has the judge of the other task. The exit code is 1 if a run misses
its bounds. One run follows the other. With ``--results``, each finished run is added to the file, and a run that the
file has is not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import agent_times
from benchmarks.demo_seeds import LEARNING_DEADLINE_S, run_demo
from benchmarks.taught_models import (
    TASKS,
    judge_folder,
    judge_words,
    policy_folder,
    write_known_verdicts,
    write_rows,
)
from relax_core.observe.service.sinks import read_metrics

HERE = Path(__file__).parent
RIGHT_VERDICTS = 0.98
TRAIN_ROWS, HELD_OUT_ROWS = 8192, 128
AGENT_WORKERS = 8
Figures = dict[str, float]
Words = Callable[[Path, int], list[str]]  # the overrides of a run with a seed, whose files go into a folder


@dataclass(frozen=True, kw_only=True)
class Case:
    """Is one kind of run.

    ``goal`` is the least that greedy answers solve at the end, of each task, and ``bound`` the most. ``moves`` is the
    most by which the end of a control may differ from the start; ``rises``: only upwards. With ``like``, the end is at
    most ``within`` below that of the same seed of another case.
    """

    words: Words
    goal: float = 0.0
    bound: float = 1.0
    moves: float = 1.0
    like: str = ""
    within: float = 0.0
    rises: bool = False
    all_seeds: bool = True


def one_judge(*, shuffled: bool) -> Words:
    """Returns the words of a run on reverse_digits with GenRM alone; ``shuffled``: its judge sees other questions."""

    def words(folder: Path, seed: int) -> list[str]:
        known = folder / "known.jsonl"
        write_known_verdicts(known, {"rev": "main"})
        return [
            *_judged(known),
            *judge_words("main", judge_folder("rev")),
            f"reward.shuffled={str(shuffled).lower()}",
            "rollout.min_p=0.1",
            "run.steps=120",
        ]

    return words


def two_judges(*, swapped: bool) -> Words:
    """Returns the words of a run on both tasks, whose rows name a judge; with ``swapped`` that of the other task."""

    def words(folder: Path, seed: int) -> list[str]:
        names = list(TASKS)
        own = dict(zip(names, names[::-1] if swapped else names, strict=True))
        write_known_verdicts(folder / "known.jsonl", {task: task for task in TASKS})
        write_rows(folder / "train.jsonl", own, rows=TRAIN_ROWS, seed=seed, held_out=False)
        sets = []
        for task in TASKS:
            file = folder / f"{task}.jsonl"
            write_rows(file, {task: own[task]}, rows=HELD_OUT_ROWS, seed=0, held_out=True)
            sets.append(f"{task}: {file}")
        return [
            *_judged(folder / "known.jsonl"),
            *(word for task in TASKS for word in judge_words(task, judge_folder(task))),
            "reward.route=judge",
            "model=qwen3",
            "model.dtype=float32",
            f"model.path={policy_folder('both')}",
            *("optimizer.lr=8e-4", "optimizer.beta2=0.999", "rollout.max_new_tokens=8"),  # the demo's
            "data=file",
            f"data.path={folder / 'train.jsonl'}",
            f"data.eval_path={folder / f'{next(iter(TASKS))}.jsonl'}",
            f"eval.sets={{{', '.join(sets)}}}",
            "rollout.min_p=0.1",
            # Without a right reward the entropy bonus moves the policy, after 200 steps to texts that no judge reads.
            f"run.steps={200 if swapped else 300}",
        ]

    return words


def _judged(known: Path) -> list[str]:
    return [
        "reward=plugin",
        f"reward.name={HERE / 'judged_digits.py'}",
        f"reward.check.path={known}",
        f"reward.check.min={RIGHT_VERDICTS}",
    ]


def played(game: str, *, of_env: str) -> Words:
    """Returns the words of a run whose episodes the program benchmarks/openai_agent.py plays."""

    def words(folder: Path, seed: int) -> list[str]:
        own = [f"experiment={of_env}", "env=agent", f"agent.command=python {HERE / 'openai_agent.py'} {game}"]
        own += [f"agent.workers={AGENT_WORKERS}", "env.max_turns=3"]
        if of_env == "number_guess":
            own += ["model=qwen3", "model.dtype=float32", f"model.path={policy_folder('guess')}"]
            own += ["optimizer.beta2=0.999"]
            # Half of its guesses heed the answers from the start, so fewer steps and less entropy teach it the rest.
            own += ["run.steps=200", "algo.entropy_coef=0.03"]
        return own

    return words


def in_process(of_env: str) -> Words:
    """Returns the words of the run with the environment of Relax, with which a run of agents is compared."""
    return lambda folder, seed: [f"experiment={of_env}"]


CASES = {
    "genrm": Case(words=one_judge(shuffled=False), goal=0.9),
    "genrm, shuffled questions": Case(words=one_judge(shuffled=True), moves=0.1, all_seeds=False),
    "two judges": Case(words=two_judges(swapped=False), goal=0.85),
    "two judges, routes swapped": Case(words=two_judges(swapped=True), moves=0.1, rises=True, all_seeds=False),
    "calculator, env": Case(words=in_process("calculator")),
    "calculator, agent": Case(words=played("calculator", of_env="calculator"), like="calculator, env", within=0.03),
    "calculator, no tool": Case(words=played("no_tool", of_env="calculator"), bound=0.02, all_seeds=False),
    "number_guess, env": Case(words=in_process("number_guess")),
    "number_guess, agent": Case(words=played("guess", of_env="number_guess"), like="number_guess, env", within=0.05),
    "number_guess, random": Case(words=played("random_guess", of_env="number_guess"), bound=0.48, all_seeds=False),
}


def command_line(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learn", action="store_true", help="train, and measure no times")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is measured")
    parser.add_argument("--steps", type=int, default=24, help="train steps of each of these measurements")
    parser.add_argument("--seeds", type=int, default=3)
    names = [*CASES, *agent_times.FIGURES]
    parser.add_argument("--only", nargs="*", default=None, choices=names, help="which kinds of runs, or which figures")
    parser.add_argument("--results", type=Path, default=None, help="file of finished runs, one JSON record a line")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    return parser.parse_args(words)


def main() -> int:
    arguments = command_line()
    if not arguments.learn:
        chosen = [name for name in agent_times.FIGURES if name in (arguments.only or agent_times.FIGURES)]
        return agent_times.measure(chosen, rounds=arguments.rounds, steps=arguments.steps)
    finished, wrong, ends = _finished(arguments.results), [], dict[tuple[str, int], float]()
    print(f"{'run':30}{'seed':>5}{'greedy':>16}{'sampled':>16}{'judge':>8}{'wall s':>8}", flush=True)
    for name in [name for name in CASES if name in (arguments.only or CASES)]:
        for seed in range(arguments.seeds if CASES[name].all_seeds else 1):
            key = (name, seed, *arguments.overrides)
            figures = finished.get(key)
            if figures is None:
                figures = learnt(CASES[name], seed, arguments.overrides)
                if arguments.results is not None:
                    with arguments.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"run": key, "figures": figures}) + "\n")
            print(_line(name, seed, figures), flush=True)
            ends[name, seed] = figures["greedy_last"]
            if not as_expected(CASES[name], figures, like=ends.get((CASES[name].like, seed))):
                wrong.append(f"{name}, seed {seed}")
    print(f"unexpected: {'; '.join(wrong)}" if wrong else "every run learns its task, and no control does")
    return 1 if wrong else 0


def learnt(case: Case, seed: int, overrides: Sequence[str]) -> Figures:
    """Returns the figures of one whole run."""
    with tempfile.TemporaryDirectory(prefix="agents-") as scratch:
        folder = Path(scratch)
        words = [*case.words(folder, seed), *overrides, f"seed={seed}"]
        summary = run_demo(folder / "run", words, deadline_s=LEARNING_DEADLINE_S)
        accuracy = [one.values["accuracy"] for one in read_metrics(folder / "run") if one.source == "judge_check"]
    return figures_of(summary) | {"judge": accuracy[-1] if accuracy else 1.0}


def _finished(results: Path | None) -> dict[tuple[Any, ...], Figures]:
    if results is None or not results.is_file():
        return {}
    records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {tuple(record["run"]): record["figures"] for record in records}


def figures_of(summary: Mapping[str, Any]) -> Figures:
    """Returns the figures of a finished run from its summary; of several evaluation sets the least solved one's."""
    first, last = ([one["exact"], *_of_sets(one["figures"])] for one in (summary["eval"][0], summary["eval"][-1]))
    moves = [after - before for before, after in zip(first, last, strict=True)]
    return {
        "greedy_first": min(first),
        "greedy_last": min(last),
        "lowest_move": min(moves),
        "highest_move": max(moves),
        "sampled_first": summary["exact"]["first"],
        "sampled_last": summary["exact"]["last"],
        "wall_s": summary["wall_s"],
    }


def _of_sets(figures: Mapping[str, float]) -> list[float]:
    """Returns the share of solved questions of each named evaluation set, in one order."""
    return [figures[f"{task}/exact"] for task in TASKS if f"{task}/exact" in figures]


def as_expected(case: Case, figures: Figures, *, like: float | None = None) -> bool:
    """Returns whether a run is within its bounds; ``like`` is the end of the run that it is compared with, if any."""
    end = figures["greedy_last"]
    return (
        case.goal <= end <= case.bound
        and figures["highest_move"] <= case.moves
        and (case.rises or figures["lowest_move"] >= -case.moves)
        and (like is None or end >= like - case.within)
    )


def _line(name: str, seed: int, figures: Figures) -> str:
    greedy = f"{figures['greedy_first']:.3f} → {figures['greedy_last']:.3f}".rjust(16)
    sampled = f"{figures['sampled_first']:.3f} → {figures['sampled_last']:.3f}".rjust(16)
    return f"{name:30}{seed:5}{greedy}{sampled}{figures['judge']:8.3f}{figures['wall_s']:8.0f}"


if __name__ == "__main__":
    sys.exit(main())
