"""Measures samples per second of whole runs and the parts of a step, compared with single-process trainers.

    python -m benchmarks.throughput [--rounds 3 --steps 120 --json FILE] [--trl-path FOLDER]
    python -m benchmarks.throughput --tail [--trl-path FOLDER]   # answers of 1 to 256 tokens, 3.2M parameters
    taskset -c 0,1 python -m benchmarks.throughput       # the same on two cores

Each round runs in this order: the plain loop (`benchmarks.plain_loop`, one thread), TRL if it is given
(`benchmarks.trl_loop`), then ``python -m relax_core`` with mode=colocate, with mode=async mode.max_staleness=0, and
with mode=async mode.max_staleness=1, each with all features enabled (ledger, tokens, all roles, metrics files). Numbers
are medians over the steps after the warm-up, then over the rounds. Use more rounds on a loaded machine.

With ``--tail`` the model has random weights, 4 layers and width 256, and the learning rate is 0 (1e-12 in Relax), so
all programs sample the same lengths: an answer ends at random after 1 to 256 tokens. Rates are then answer tokens per
second over all measured steps, and mode=async runs with max_staleness 1 and 2. "2 threads" is mode=colocate, when
engine and trainer alternate, with two threads each.

Parts of a step. ``train``: forward, backward, optimizer. ``sync``: publishing the weights; with mode=colocate also the
calls that let engines release and resume their memory. Without overlap (staleness 0) ``engine`` (prefill and decode),
``reward`` and the whole push of the weights are on the step's critical path, and ``bus+control`` is the rest of the
step: hops between processes, decoding of rows, the trainer's record. At staleness 1 generation and push overlap with
training: ``sync`` is the time that the trainer waits for the push. ``of which bus`` is the time of the trainer's calls
to the bus. ``of which wait`` is the time that these calls wait for rows that are not ready. ``bus+control`` includes
both times and the rest of the step, so it is an upper bound.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import QUIET_RUN, Metrics, command_line, machine, python, run_relax, take_turns, write_report
from relax_core.observe.event_log import ROLLOUT

SKIPPED_STEPS = 10  # warm-up of caches and allocators; then the pipeline is full
TAIL_SKIPPED_STEPS, TAIL_STEPS = 3, 14  # fewer, because these steps take seconds
PLAIN, TRL, COLOCATE, STRICT = "plain loop", "TRL", "colocate", "async s=0"
ASYNC, ASYNC_2 = "async s=1", "async s=2"
OVERRIDES = {
    COLOCATE: ("mode=colocate",),
    STRICT: ("mode=async", "mode.max_staleness=0"),
    ASYNC: ("mode=async", "mode.max_staleness=1"),
}
# With mode=colocate engine and trainer alternate, so each may use both cores.
TAIL_OVERRIDES = {
    COLOCATE: OVERRIDES[COLOCATE],
    "2 threads": (*OVERRIDES[COLOCATE], "engine.threads=2"),
    ASYNC: OVERRIDES[ASYNC],
    ASYNC_2: ("mode=async", "mode.max_staleness=2"),
}
TAIL_TOKENS = 256  # maximum tokens of an answer
TAIL_MODEL = ("256", "768", "4", "8", "4", "32", "56")  # arguments of benchmarks.random_model
TAIL_RUN = (
    "model=qwen3",
    "model.dtype=float32",
    f"rollout.max_new_tokens={TAIL_TOKENS}",
    "optimizer.lr=1e-12",
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Defines a measurement.

    ``flags`` are arguments of the single-process loops. ``ways`` maps names to the overrides of a run. Each run also
    has ``overrides``.
    """

    ways: Mapping[str, Sequence[str]]
    skipped: int = SKIPPED_STEPS
    rate: str = "samples"
    flags: Sequence[str] = ()
    overrides: Sequence[str] = ()

    @staticmethod
    def tail(model: Path) -> Task:
        """Returns the task with answers of 1 to 256 tokens. Writes the task's model into the folder ``model``."""
        python("benchmarks.random_model", str(model), *TAIL_MODEL)
        return Task(
            ways=TAIL_OVERRIDES,
            skipped=TAIL_SKIPPED_STEPS,
            rate="tokens",
            flags=(f"--model={model}", f"--new-tokens={TAIL_TOKENS}", "--learning-rate=0"),
            overrides=(*TAIL_RUN, f"model.path={model}"),
        )


def main() -> int:
    given = parse()
    print(machine(), flush=True)
    single = (PLAIN,) if given.trl_path is None else (PLAIN, TRL)
    with tempfile.TemporaryDirectory(prefix="relax-throughput-") as folder:
        task = Task.tail(Path(folder) / "model") if given.tail else Task(ways=OVERRIDES)
        ways: dict[str, Callable[[int], Metrics]] = {
            name: partial(measure_single, name, task, given) for name in single
        }
        ways |= {name: partial(measure_run, name, task, given.steps) for name in task.ways}
        found = take_turns("throughput", ways, rounds=given.rounds, warm_up=False)
    for base in single:
        print(found.table(base=base, ratio_of=[f"{task.rate}/s"]))
    write_report(given.json, found)
    return 0


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--tail", action="store_true", help="answers of 1 to 256 tokens, model of 3.2M parameters")
    parser.add_argument("--steps", type=int, help=f"train steps of a run; by default 120, with --tail {TAIL_STEPS}")
    parser.add_argument(
        "--plain-steps", type=int, help=f"steps of single-process loops; default 60, with --tail {TAIL_STEPS}"
    )
    parser.add_argument("--trl-path", type=Path, default=None, help="folder with TRL, see benchmarks/trl_loop.py")
    given = parser.parse_args()
    given.steps = given.steps or (TAIL_STEPS if given.tail else 120)
    given.plain_steps = given.plain_steps or (TAIL_STEPS if given.tail else 60)
    least = 2 * (TAIL_SKIPPED_STEPS if given.tail else SKIPPED_STEPS)
    if min(given.steps, given.plain_steps) <= least:
        parser.error(f"--steps and --plain-steps: more than {least}")
    return given


# -- measuring --------------------------------------------------------------------------------------------------------
def measure_single(name: str, task: Task, given: argparse.Namespace, number: int) -> Metrics:
    """Returns the metrics of a single-process trainer."""
    trl = [f"--trl-path={given.trl_path}"] if name == TRL else []
    module = "benchmarks.trl_loop" if name == TRL else "benchmarks.plain_loop"
    output = python(module, *task.flags, f"--steps={given.plain_steps}", f"--seed={number}", *trl)
    return single_metrics(json.loads(output), skipped=task.skipped)


def measure_run(name: str, task: Task, steps: int, number: int) -> Metrics:
    """Returns the metrics of a whole run."""
    settings = (*task.ways[name], *task.overrides, *QUIET_RUN, f"run.steps={steps}", f"seed={number}")
    with tempfile.TemporaryDirectory(prefix="relax-throughput-") as folder:
        run = run_relax(Path(folder) / "run", *settings)
    if run.summary["steps_recorded"] != steps:
        sys.exit(f"the run ended with {run.summary['steps_recorded']} of {steps} records")
    figures = run_metrics(name, run.steps(), run.steps(ROLLOUT), skipped=task.skipped)
    return figures | {"first_step_s": run.summary["first_step_s"]}


# -- metrics ----------------------------------------------------------------------------------------------------------
def single_metrics(steps: Sequence[Mapping[str, float]], *, skipped: int = SKIPPED_STEPS) -> Metrics:
    """Returns medians over a single-process trainer's steps after the warm-up, with the parts of a step if reported."""
    measured = steps[skipped:]
    parts = {"step": "step_ms", "engine": "generate_ms", "reward": "reward_ms", "train": "train_ms"}
    return _speed(measured) | {
        part: median(record[name] for record in measured) for part, name in parts.items() if name in measured[0]
    }


def run_metrics(
    name: str,
    actor: Mapping[int, Mapping[str, float]],
    rollout: Mapping[int, Mapping[str, float]],
    *,
    skipped: int = SKIPPED_STEPS,
) -> Metrics:
    """Returns a run's metrics in milliseconds from the trainer's and the rollout's records by step.

    Without overlap, the prompt batch of step t and the push in the record of step t belong to weight version t.
    """
    # The last step differs in time, because it requests no rows for a next step.
    steps = sorted(actor)[skipped:-1]
    prompt_batches = [rollout[step] for step in steps if step in rollout]
    sync, rest_ms = [], []
    for step in steps:
        record = actor[step]
        sync.append(record["sync_ms"] + (record["push_ms"] if name == STRICT else 0.0))
        on_path = 0.0 if name in (ASYNC, ASYNC_2) else rollout[step]["engine_ms"] + rollout[step]["reward_ms"]
        rest_ms.append(record["step_ms"] - record["train_ms"] - sync[-1] - on_path)
    return _speed([actor[step] for step in steps]) | {
        "step": median(actor[step]["step_ms"] for step in steps),
        "engine": median(batch["engine_ms"] for batch in prompt_batches),
        "reward": median(batch["reward_ms"] for batch in prompt_batches),
        "train": median(actor[step]["train_ms"] for step in steps),
        "sync": median(sync),
        "bus+control": median(rest_ms),
        "of which bus": median(actor[step]["bus_ms"] for step in steps),
        "of which wait": median(actor[step]["wait_ms"] for step in steps),
        "control+bus+sync": median(a + b for a, b in zip(sync, rest_ms, strict=True)),
    }


def _speed(measured: Sequence[Mapping[str, float]]) -> Metrics:
    """Returns rates. ``samples/s`` is the rate of the median step; the other rates are means over all steps."""
    samples, tokens, milliseconds = (
        sum(record[name] for record in measured) for name in ("samples", "tokens", "step_ms")
    )
    return {
        "tokens/s": 1e3 * tokens / milliseconds,
        "samples/s": median(1e3 * record["samples"] / record["step_ms"] for record in measured),
        "samples/s, mean": 1e3 * samples / milliseconds,
    }


if __name__ == "__main__":
    sys.exit(main())
