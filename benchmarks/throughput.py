"""Samples a second of whole runs, where a step's milliseconds go, and a plain transformers loop beside them.

    python -m benchmarks.throughput [--repeats 3 --steps 120 --json FILE]
    taskset -c 0,1 python -m benchmarks.throughput       # the same on two cores

Each repeat runs, one after the other: the plain loop (`benchmarks.plain_loop`, one thread), then ``python -m relax_core``
with mode=colocate, with mode=async mode.max_staleness=0, and with mode=async mode.max_staleness=1, each with everything
on (ledger, tokens, all roles, metrics files). So the ratios hold on any machine, loaded or not. Figures are medians over
the steps after the tenth, then medians over the repeats.

How a step is split. ``train``: forward, backward, optimizer. ``sync``: publishing the weights; with mode=colocate also
telling the engines to give up their memory and to take it back. Without overlap (staleness 0) ``engine`` (prefill and
decode) and ``reward`` stand on the step path, and ``bus+control`` is the rest of the step: every hop between processes,
decoding of rows, the trainer's record. At staleness 1 generation runs beside the trainer: ``wait`` is what the trainer
spent on the bus and on rows that were not ready, and ``bus+control`` is that and the rest, so it is an upper bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from relax_core.observe.records import ACTOR, ROLLOUT, by_step
from relax_core.observe.sinks import read_metrics

SKIPPED_STEPS = 10  # warm-up of caches and allocators; the pipeline fills
DEADLINE_S = 900
PLAIN, COLOCATE, STRICT, ASYNC = "plain loop", "colocate", "async s=0", "async s=1"
OVERRIDES = {
    COLOCATE: ("mode=colocate",),
    STRICT: ("mode=async", "mode.max_staleness=0"),
    ASYNC: ("mode=async", "mode.max_staleness=1"),
}
QUIET_RUN = ("eval.every=0", "run.save_every=0", "run.export_hf=false", "run.panel=false")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

Figures = dict[str, float]


def main() -> None:
    arguments = _parse()
    print(_machine_line())
    found: dict[str, list[Figures]] = {name: [] for name in (PLAIN, *OVERRIDES)}
    for repeat in range(arguments.repeats):
        found[PLAIN].append(_plain(arguments.plain_steps, seed=repeat))
        for name, overrides in OVERRIDES.items():
            found[name].append(_run(overrides, steps=arguments.steps, seed=repeat))
        print(f"repeat {repeat + 1} of {arguments.repeats}: " + _speeds(found), flush=True)
    medians = {name: _medians(repeats) for name, repeats in found.items()}
    print(table(medians))
    if arguments.json is not None:
        report = {"machine": _machine(), "medians": medians, "repeats": found}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="train steps of a run")
    parser.add_argument("--plain-steps", type=int, default=60, help="train steps of the plain loop")
    parser.add_argument("--json", type=Path, default=None, help="write all figures here")
    arguments = parser.parse_args()
    if min(arguments.steps, arguments.plain_steps) <= 2 * SKIPPED_STEPS or arguments.repeats < 1:
        parser.error(f"--steps and --plain-steps: more than {2 * SKIPPED_STEPS}; --repeats: 1 or more")
    return arguments


# -- measuring --------------------------------------------------------------------------------------------------------
def _plain(steps: int, *, seed: int) -> Figures:
    output = _python("benchmarks.plain_loop", f"--steps={steps}", f"--seed={seed}")
    records: list[Figures] = json.loads(output)
    return plain_figures(records)


def _run(overrides: Sequence[str], *, steps: int, seed: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="relax-throughput-") as folder:
        run_dir = Path(folder) / "run"
        _python("relax_core", *overrides, *QUIET_RUN, f"run.steps={steps}", f"seed={seed}", f"run.dir={run_dir}")
        records = read_metrics(run_dir)
        summary = json.loads((run_dir / "summary.json").read_text())
    if summary["outcome"] != "finished" or summary["steps_recorded"] != steps:
        raise SystemExit(f"the run ended with {summary['outcome']!r} and {summary['steps_recorded']} of {steps} records")
    overlapped = ASYNC in OVERRIDES and tuple(overrides) == OVERRIDES[ASYNC]
    figures = run_figures(by_step(records, ACTOR), by_step(records, ROLLOUT), overlapped=overlapped)
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
        raise SystemExit(f"python -m {module} {' '.join(arguments)} ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
    return ended.stdout


# -- figures ----------------------------------------------------------------------------------------------------------
def plain_figures(steps: Sequence[Mapping[str, float]]) -> Figures:
    """Medians over the plain loop's steps after the warm-up."""
    measured = steps[SKIPPED_STEPS:]
    return _speed(measured) | {
        "step": _over(measured, lambda one: one["step_ms"]),
        "engine": _over(measured, lambda one: one["generate_ms"]),
        "reward": _over(measured, lambda one: one["reward_ms"]),
        "train": _over(measured, lambda one: one["train_ms"]),
    }


def run_figures(
    actor: Mapping[int, Mapping[str, float]], rollout: Mapping[int, Mapping[str, float]], *, overlapped: bool
) -> Figures:
    """A run's figures from the trainer's and the rollout's records, by step; milliseconds.

    ``overlapped``: generation runs beside the trainer. Otherwise step t's burst is the one of weight version t.
    """
    # The last step has no next one to ask for rows for, so its time is not like the others'.
    measured = [dict(actor[step]) for step in sorted(actor)[SKIPPED_STEPS:-1]]
    bursts = [rollout[step] for step in sorted(actor)[SKIPPED_STEPS:-1] if step in rollout]
    for one, burst in zip(measured, bursts, strict=True) if not overlapped else ():
        one["on_path_ms"] = burst["engine_ms"] + burst["reward_ms"]

    def bus_and_control(one: Mapping[str, float]) -> float:
        return one["step_ms"] - one.get("on_path_ms", 0.0) - one["train_ms"] - one["sync_ms"]

    return _speed(measured) | {
        "step": _over(measured, lambda one: one["step_ms"]),
        "engine": _over(bursts, lambda one: one["engine_ms"]),
        "reward": _over(bursts, lambda one: one["reward_ms"]),
        "train": _over(measured, lambda one: one["train_ms"]),
        "sync": _over(measured, lambda one: one["sync_ms"]),
        "bus+control": _over(measured, bus_and_control),
        "of which wait": _over(measured, lambda one: one["wait_ms"]),
        "control+bus+sync": _over(measured, lambda one: bus_and_control(one) + one["sync_ms"]),
    }


def _speed(measured: Sequence[Mapping[str, float]]) -> Figures:
    """``samples/s``: of the median step. ``samples/s, mean``: all samples by all the time, slow steps included."""
    samples, milliseconds = (sum(one[name] for one in measured) for name in ("samples", "step_ms"))
    return {
        "samples/s": _over(measured, lambda one: 1e3 * one["samples"] / one["step_ms"]),
        "samples/s, mean": 1e3 * samples / milliseconds,
    }


def _over(records: Sequence[Mapping[str, float]], value: Callable[[Mapping[str, float]], float]) -> float:
    return median(value(one) for one in records)


def _medians(repeats: Sequence[Figures]) -> Figures:
    return {name: median(one[name] for one in repeats) for name in repeats[0]}


# -- print-out --------------------------------------------------------------------------------------------------------
def table(medians: Mapping[str, Figures]) -> str:
    """One column a way, one row a figure."""
    plain = medians[PLAIN]["samples/s"]
    rows = ["samples/s", "samples/s, mean", "step", "engine", "reward", "train", "sync", "bus+control"]
    rows += ["of which wait", "control+bus+sync", "first_step_s"]
    lines = ["", f"{'':24}" + "".join(f"{name:>12}" for name in medians)]
    for row in rows:
        cells = "".join(f"{one[row]:12.0f}" if row.startswith("samples") else f"{one[row]:12.1f}" if row in one else f"{'':12}"
                        for one in medians.values())
        unit = "" if row.startswith("samples") or row == "first_step_s" else ", ms"
        lines.append(f"{row + unit:24}" + cells)
    lines.append(f"{'of the plain loop':24}" + "".join(f"{one['samples/s'] / plain:11.2f}×" for one in medians.values()))
    return "\n".join(lines)


def _speeds(found: Mapping[str, Sequence[Figures]]) -> str:
    return ", ".join(f"{name} {repeats[-1]['samples/s']:,.0f}/s" for name, repeats in found.items())


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else "unknown", "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}


def _machine_line() -> str:
    machine = _machine()
    return f"{machine['cores']} cores of {machine['cpu']}, load {machine['load']:.1f} before the first run"


if __name__ == "__main__":
    main()
