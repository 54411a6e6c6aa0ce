"""Samples a second of whole runs, where a step's milliseconds go, and single-process trainers beside them.

    python -m benchmarks.throughput [--repeats 3 --steps 120 --json FILE] [--trl-path FOLDER]
    python -m benchmarks.throughput --tail [--trl-path FOLDER]   # answers of 1 to 256 tokens, 3.2M parameters
    taskset -c 0,1 python -m benchmarks.throughput       # the same on two cores

Each repeat runs, one after the other: the plain loop (`benchmarks.plain_loop`, one thread), TRL where it is given
(`benchmarks.trl_loop`), then ``python -m relax_core`` with mode=colocate, with mode=async mode.max_staleness=0, and
with mode=async mode.max_staleness=1, each with everything on (ledger, tokens, all roles, metrics files). So the ratios
hold on any machine; on a loaded one take more repeats. Figures are medians over the steps after the warm-up, then over
the repeats; a ratio is the median of the repeats' own ratios.

With ``--tail`` the model has random weights, 4 layers and width 256, and the learning rate is 0 (1e-12 in Relax), so
that all draw the same lengths: an answer ends by chance, after 1 to 256 tokens. Rates are then tokens of answers a
second over all measured steps, and mode=async runs with max_staleness 1 and 2. "2 threads" is mode=colocate, where
engine and trainer take turns, with two threads each.

How a step is split. ``train``: forward, backward, optimizer. ``sync``: publishing the weights; with mode=colocate also
telling the engines to give up their memory and to take it back. Without overlap (staleness 0) ``engine`` (prefill and
decode), ``reward`` and the whole push of the weights stand on the step path, and ``bus+control`` is the rest of the
step: every hop between processes, decoding of rows, the trainer's record. At staleness 1 generation and push run beside
the trainer: ``sync`` is what the trainer waited for, ``of which bus`` what its calls to the bus took, ``of which wait``
how long they waited there for rows that were not ready; ``bus+control`` is both and the rest, so it is an upper bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from relax_core.observe.service.records import ACTOR, ROLLOUT, by_step
from relax_core.observe.service.sinks import read_metrics

SKIPPED_STEPS = 10  # warm-up of caches and allocators; the pipeline fills
TAIL_SKIPPED_STEPS, TAIL_STEPS = 3, 14  # steps of seconds, not of milliseconds
DEADLINE_S = 900
PLAIN, TRL, COLOCATE, STRICT = "plain loop", "TRL", "colocate", "async s=0"
ASYNC, ASYNC_2 = "async s=1", "async s=2"
OVERRIDES = {
    COLOCATE: ("mode=colocate",),
    STRICT: ("mode=async", "mode.max_staleness=0"),
    ASYNC: ("mode=async", "mode.max_staleness=1"),
}
# With mode=colocate engine and trainer take turns, so each may have both cores.
TAIL_OVERRIDES = {
    COLOCATE: OVERRIDES[COLOCATE],
    "2 threads": (*OVERRIDES[COLOCATE], "parallel.threads_per_rank=2", "engine.threads=2"),
    ASYNC: OVERRIDES[ASYNC],
    ASYNC_2: ("mode=async", "mode.max_staleness=2"),
}
TAIL_TOKENS = 256  # most tokens of an answer
TAIL_MODEL = ("256", "768", "4", "8", "4", "32", "56")  # sizes for benchmarks.random_model; the last: its tokenizer's
TAIL_RUN = (
    "model=qwen3",
    "model.dtype=float32",
    f"rollout.max_new_tokens={TAIL_TOKENS}",
    "optimizer.lr=1e-12",
)
QUIET_RUN = ("eval.every=0", "run.save_every=0", "run.export_hf=false", "run.panel=false")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Says what is measured: ``flags`` of the single-process loops, and ``overrides`` of the runs of all ``ways``."""

    ways: Mapping[str, Sequence[str]]
    skipped: int = SKIPPED_STEPS
    rate: str = "samples"
    flags: Sequence[str] = ()
    overrides: Sequence[str] = ()

    @staticmethod
    def tail(model: Path) -> Task:
        """Returns the task whose answers have 1 to 256 tokens, with a model that it makes in the folder ``model``."""
        _python("benchmarks.random_model", str(model), *TAIL_MODEL)
        return Task(
            ways=TAIL_OVERRIDES,
            skipped=TAIL_SKIPPED_STEPS,
            rate="tokens",
            flags=(f"--model={model}", f"--new-tokens={TAIL_TOKENS}", "--learning-rate=0"),
            overrides=(*TAIL_RUN, f"model.path={model}"),
        )


def main() -> None:
    arguments = _parse()
    print(_machine_line())
    with tempfile.TemporaryDirectory(prefix="relax-throughput-") as folder:
        task = Task.tail(Path(folder) / "model") if arguments.tail else Task(ways=OVERRIDES)
        found = _measured(task, arguments)
    medians = {name: _medians(repeats) for name, repeats in found.items()}
    ratios = {base: ratios_to(base, found, rate=f"{task.rate}/s") for base in (PLAIN, TRL) if base in found}
    print(table(medians, ratios))
    if arguments.json is not None:
        report = {"machine": _machine(), "medians": medians, "ratios": ratios, "repeats": found}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tail", action="store_true", help="answers of 1 to 256 tokens and 3.2M parameters")
    parser.add_argument("--steps", type=int, help=f"train steps of a run; by default 120, with --tail {TAIL_STEPS}")
    parser.add_argument("--plain-steps", type=int, help=f"those of the plain loop; 60, with --tail {TAIL_STEPS}")
    parser.add_argument("--trl-path", type=Path, default=None, help="folder with TRL, see benchmarks/trl_loop.py")
    parser.add_argument("--json", type=Path, default=None, help="write all figures here")
    given = parser.parse_args()
    given.steps = given.steps or (TAIL_STEPS if given.tail else 120)
    given.plain_steps = given.plain_steps or (TAIL_STEPS if given.tail else 60)
    least = 2 * (TAIL_SKIPPED_STEPS if given.tail else SKIPPED_STEPS)
    if min(given.steps, given.plain_steps) <= least or given.repeats < 1:
        parser.error(f"--steps and --plain-steps: more than {least}; --repeats: 1 or more")
    return given


# -- measuring --------------------------------------------------------------------------------------------------------
def _measured(task: Task, given: argparse.Namespace) -> dict[str, list[Figures]]:
    """Runs all ways in turns and returns the figures of each, one for each repeat."""
    single = (PLAIN,) if given.trl_path is None else (PLAIN, TRL)
    found: dict[str, list[Figures]] = {name: [] for name in (*single, *task.ways)}
    for repeat in range(given.repeats):
        for name in single:
            found[name].append(_single(name, task, given, seed=repeat))
        for name in task.ways:
            found[name].append(_run(name, task, steps=given.steps, seed=repeat))
        print(f"repeat {repeat + 1} of {given.repeats}: " + _speeds(found, rate=f"{task.rate}/s"), flush=True)
    return found


def _single(name: str, task: Task, given: argparse.Namespace, *, seed: int) -> Figures:
    flags = [*task.flags, f"--steps={given.plain_steps}", f"--seed={seed}"]
    if name == TRL:
        output = _python("benchmarks.trl_loop", *flags, f"--trl-path={given.trl_path}")
    else:
        output = _python("benchmarks.plain_loop", *flags)
    return single_figures(json.loads(output), skipped=task.skipped)


def _run(name: str, task: Task, *, steps: int, seed: int) -> Figures:
    settings = (*task.ways[name], *task.overrides, *QUIET_RUN, f"run.steps={steps}", f"seed={seed}")
    with tempfile.TemporaryDirectory(prefix="relax-throughput-") as folder:
        run_dir = Path(folder) / "run"
        _python("relax_core", *settings, f"run.dir={run_dir}")
        records = read_metrics(run_dir)
        summary = json.loads((run_dir / "summary.json").read_text())
    if summary["outcome"] != "finished" or summary["steps_recorded"] != steps:
        raise SystemExit(
            f"the run ended with {summary['outcome']!r} and {summary['steps_recorded']} of {steps} records"
        )
    figures = run_figures(name, by_step(records, ACTOR), by_step(records, ROLLOUT), skipped=task.skipped)
    return figures | {"first_step_s": summary["first_step_s"], "staleness_max": summary["staleness"]["max"]}


def _python(module: str, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(
            f"python -m {module} {' '.join(arguments)} ended with {ended.returncode}:\n{ended.stderr[-4000:]}"
        )
    return ended.stdout


# -- figures ----------------------------------------------------------------------------------------------------------
def single_figures(steps: Sequence[Mapping[str, float]], *, skipped: int = SKIPPED_STEPS) -> Figures:
    """Medians over a single-process trainer's steps after the warm-up; its parts where it tells them."""
    measured = steps[skipped:]
    parts = {"step": "step_ms", "engine": "generate_ms", "reward": "reward_ms", "train": "train_ms"}
    return _speed(measured) | {
        part: median(one[name] for one in measured) for part, name in parts.items() if name in measured[0]
    }


def run_figures(
    name: str,
    actor: Mapping[int, Mapping[str, float]],
    rollout: Mapping[int, Mapping[str, float]],
    *,
    skipped: int = SKIPPED_STEPS,
) -> Figures:
    """A run's figures from the trainer's and the rollout's records, by step; milliseconds.

    Without overlap the prompt batch of step t is the one of weight version t, and so is the push that its record tells.
    """
    # The last has no next one to ask rows for, so its time is not like the others'.
    steps = sorted(actor)[skipped:-1]
    prompt_batches = [rollout[step] for step in steps if step in rollout]
    sync, other = [], []
    for step in steps:
        one = actor[step]
        sync.append(one["sync_ms"] + (one["push_ms"] if name == STRICT else 0.0))
        on_path = 0.0 if name in (ASYNC, ASYNC_2) else rollout[step]["engine_ms"] + rollout[step]["reward_ms"]
        other.append(one["step_ms"] - one["train_ms"] - sync[-1] - on_path)
    return _speed([actor[step] for step in steps]) | {
        "step": median(actor[step]["step_ms"] for step in steps),
        "engine": median(one["engine_ms"] for one in prompt_batches),
        "reward": median(one["reward_ms"] for one in prompt_batches),
        "train": median(actor[step]["train_ms"] for step in steps),
        "sync": median(sync),
        "bus+control": median(other),
        "of which bus": median(actor[step]["bus_ms"] for step in steps),
        "of which wait": median(actor[step]["wait_ms"] for step in steps),
        "control+bus+sync": median(a + b for a, b in zip(sync, other, strict=True)),
    }


def ratios_to(base: str, found: Mapping[str, Sequence[Figures]], *, rate: str = "samples/s") -> Figures:
    """The ``rate`` over that of ``base`` in the same repeat; the median of the repeats."""
    return {
        name: median(one[rate] / of[rate] for one, of in zip(repeats, found[base], strict=True))
        for name, repeats in found.items()
    }


def _speed(measured: Sequence[Mapping[str, float]]) -> Figures:
    """``samples/s``: of the median step. The others are of all the time, slow steps included."""
    samples, tokens, milliseconds = (sum(one[name] for one in measured) for name in ("samples", "tokens", "step_ms"))
    return {
        "tokens/s": 1e3 * tokens / milliseconds,
        "samples/s": median(1e3 * one["samples"] / one["step_ms"] for one in measured),
        "samples/s, mean": 1e3 * samples / milliseconds,
    }


def _medians(repeats: Sequence[Figures]) -> Figures:
    return {name: median(one[name] for one in repeats) for name in repeats[0]}


# -- print-out --------------------------------------------------------------------------------------------------------
def table(medians: Mapping[str, Figures], ratios: Mapping[str, Figures]) -> str:
    """One column a way, one row a figure."""
    rows = ["tokens/s", "samples/s", "samples/s, mean", "step", "engine", "reward", "train", "sync", "bus+control"]
    rows += ["of which bus", "of which wait", "control+bus+sync", "first_step_s"]
    lines = ["", f"{'':24}" + "".join(f"{name:>12}" for name in medians)]
    for row in rows:
        rate = row.startswith(("samples", "tokens"))
        cells = [f"{one[row]:{'12.0f' if rate else '12.1f'}}" if row in one else " " * 12 for one in medians.values()]
        lines.append(f"{row if rate or row == 'first_step_s' else row + ', ms':24}" + "".join(cells))
    for base, of in ratios.items():
        lines.append(f"{'of the ' + base:24}" + "".join(f"{of[name]:11.2f}×" for name in medians))
    return "\n".join(lines)


def _speeds(found: Mapping[str, Sequence[Figures]], *, rate: str) -> str:
    return ", ".join(f"{name} {repeats[-1][rate]:,.0f} {rate}" for name, repeats in found.items())


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else "unknown", "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}


def _machine_line() -> str:
    machine = _machine()
    return f"{machine['cores']} cores of {machine['cpu']}, load {machine['load']:.1f} before the first run"


if __name__ == "__main__":
    main()
