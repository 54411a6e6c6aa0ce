"""Measures staleness, over-sampling and partial rollouts against mode=colocate on answers with long-tailed lengths.

    python -m benchmarks.long_tail [--steps 40 --prompts 8 --group-size 6] [--only "async s=2" …] [--json FILE]
    python -m benchmarks.long_tail --turns 3 --tool-wait 0.5 […]        # episodes of several turns with slow tools

Each round executes one complete run of each setting. The task's prompts set the length of the answer
(benchmarks/countdown_task.py): lognormal, sigma = 1, a mean of 64 tokens, at most 1,024. All runs have the same prompts
in the same order, a Qwen3 of 6.0 million parameters, one thread for the trainer and one thread for the engine. With
``--turns`` each episode has this number of turns, and each turn has an answer of such a length. A tool runs between two
turns. Its time is lognormal, too, with a mean of ``--tool-wait`` seconds and a maximum of eight times the mean
(benchmarks/countdown_env.py).

``samples/s`` and ``tokens/s`` count trained samples and tokens from the end of train step ``--skip`` to the end of the
second last step. ``training`` and ``waiting`` are shares of the trainer's time. ``reward`` is the mean of the last five
steps. The initial model scores 0.6 in the first turn and 0.5 in later turns. ``stale`` and ``surplus`` count dropped
samples.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from benchmarks.countdown_env import LONGEST_WAIT
from benchmarks.countdown_task import PROMPT_TOKENS, drawn_lengths, max_turn_tokens_of, model_folder, write_rows
from benchmarks.harness import (
    QUIET_RUN,
    FinishedRun,
    Metrics,
    command_line,
    machine,
    run_relax,
    take_turns,
    write_report,
)

SPARE = 1.5  # rollout.over_sampling
STEP_S = 30.0  # timeout of an env call, in addition to the tool's wait
LAST_STEPS = 5
REWARD, ENV = (Path(__file__).with_name(f"countdown_{kind}.py") for kind in ("reward", "env"))
COLOCATE = "colocate"
WAYS: Mapping[str, Sequence[str]] = {
    COLOCATE: ("mode=colocate",),
    **{f"async s={number}": ("mode=async", f"mode.max_staleness={number}") for number in (0, 1, 2, 4)},
    **{
        f"s=2, x{SPARE} {surplus}": (
            *("mode=async", "mode.max_staleness=2"),
            *(f"rollout.over_sampling={SPARE}", f"rollout.surplus={surplus}"),
        )
        for surplus in ("drop", "keep")
    },
    "s=2, abort": ("mode=async", "mode.max_staleness=2", "rollout.partial=abort"),
}


def words_of(given: argparse.Namespace, rows: Path, *, seed: int) -> list[str]:
    """Returns the overrides of a run that uses the rows of a file in order."""
    limit, room = "rollout.max_new_tokens", given.running * given.turns * (given.cap + PROMPT_TOKENS)
    env: list[str] = []
    if given.turns > 1:
        limit = "env.max_turn_tokens"
        env = [
            *("env=plugin", f"env.name={ENV}", f"env.max_turns={given.turns}", f"{limit}={given.cap}"),
            *(f"env.tool_wait_s={given.tool_wait}", f"env.step_timeout_s={STEP_S + LONGEST_WAIT * given.tool_wait}"),
            f"engine.prefix_cache_tokens={room}",
        ]
    return [
        *("model=qwen3", f"model.path={model_folder()}", "model.dtype=float32"),
        *("data=file", f"data.path={rows}", "data.shuffle=false", "data.eval_size=0", "data.max_bad_rows=0"),
        *("reward=plugin", f"reward.name={REWARD}", f"reward.cap=${{{limit}}}"),
        *env,
        *(f"rollout.prompts_per_step={given.prompts}", f"algo.group_size={given.group_size}"),
        f"rollout.max_new_tokens={given.turns * given.cap}",
        *(f"engine.max_running_samples={given.running}", f"engine.max_total_tokens={room}"),
        f"parallel.micro_batch_tokens={given.micro_batch}",
        *(f"optimizer.lr={given.lr}", "optimizer.schedule=constant", f"run.steps={given.steps}", f"seed={seed}"),
        *QUIET_RUN,
    ]


def metrics_of(run: FinishedRun, *, skipped: int) -> Metrics:
    """Returns a run's metrics. The last step is used for the reward only."""
    actor = run.steps()
    steps = sorted(actor)
    measured = [actor[step] for step in steps[skipped:-1]]
    spent = {
        name: sum(record[name] for record in measured)
        for name in ("step_ms", "samples", "tokens", "train_ms", "wait_ms")
    }
    dropped = run.summary["ledger"]["dropped"]
    return {
        "samples/s": 1e3 * spent["samples"] / spent["step_ms"],
        "tokens/s": 1e3 * spent["tokens"] / spent["step_ms"],
        "length": spent["tokens"] / spent["samples"],
        "training": spent["train_ms"] / spent["step_ms"],
        "waiting": spent["wait_ms"] / spent["step_ms"],
        "staleness": fmean(record["staleness_mean"] for record in measured),
        "stale": float(dropped.get("stale", 0)),
        "surplus": float(dropped.get("over_sampled", 0)),
        "reward": fmean(actor[step]["reward"] for step in steps[-LAST_STEPS:]),
    }


def run_way(way: Sequence[str], given: argparse.Namespace, number: int) -> Metrics:
    """Executes one run with the overrides ``way`` in round ``number``. Runs of the same round have the same prompts."""
    # A run reads more prompts than it trains, because of over-sampling and because prompts of later steps are already
    # admitted at its end.
    count, seed = math.ceil(given.prompts * (SPARE * (given.steps + 6) + 1)), given.seed + number
    lengths = drawn_lengths(count * given.turns, mean=given.mean, cap=given.cap, seed=seed)
    wishes = [lengths[first : first + given.turns] for first in range(0, len(lengths), given.turns)]
    with tempfile.TemporaryDirectory(prefix="relax-tail-") as scratch:
        rows = Path(scratch) / "rows.jsonl"
        write_rows(rows, wishes, seed=seed)
        run = run_relax(Path(scratch) / "run", *words_of(given, rows, seed=seed), *way)
    return metrics_of(run, skipped=given.skip)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = command_line(__doc__, rounds=1)
    parser.add_argument("--steps", type=int, default=40, help="train steps of a run")
    parser.add_argument("--skip", type=int, default=8, help="train steps at the start that are left out of the rates")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a train step")
    parser.add_argument("--group-size", type=int, default=6, help="answers to a prompt")
    parser.add_argument("--mean", type=float, default=64.0, help="mean tokens of an answer before the cap")
    parser.add_argument("--turns", type=int, default=1, help="turns of an episode")
    parser.add_argument("--tool-wait", type=float, default=0.5, help="mean seconds of a tool between two turns")
    parser.add_argument("--cap", type=int, help="maximum tokens of a turn; default: the limit of the model's positions")
    parser.add_argument("--running", type=int, default=512, help="maximum samples decoded at the same time")
    parser.add_argument("--micro-batch", type=int, default=1024, help="parallel.micro_batch_tokens")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS), help="run only these settings")
    given = parser.parse_args(words)
    longest = max_turn_tokens_of(given.turns)
    given.cap = given.cap or longest
    if given.cap > longest:
        parser.error(f"--cap {given.cap}: the model has no positions for {given.turns} such turns; {longest} or less")
    if not 1 <= given.skip <= given.steps - 4:
        parser.error(f"--skip {given.skip}: use a number from 1 to --steps minus 4")
    return given


def main() -> int:
    given = parse()
    print(f"{machine()}; the model is in {model_folder()}", flush=True)
    ways = {name: partial(run_way, WAYS[name], given) for name in given.only}
    found = take_turns("long tail", ways, rounds=given.rounds, warm_up=False)
    base = COLOCATE if COLOCATE in ways else given.only[0]
    print(found.table(base=base, ratio_of=["samples/s"]))
    write_report(given.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
