"""What a step costs while one of two engines stands still: ``python -m benchmarks.stopped_engine [--seconds 10]``.

A real run of the demo at staleness 1 with two engines. After some steps one engine's process gets SIGSTOP, and SIGCONT
after ``--seconds``. Printed are the median step before it, the longest step and its parts while the engine stands still
and until it serves the newest weights again, how many steps were done meanwhile, and how long after SIGCONT the engine
has caught up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from statistics import median
from urllib.request import urlopen

import psutil

from tests.integration.live_run import ENGINE, LiveRun

OVERRIDES = (
    "mode=async",
    "engine.count=2",
    "eval.every=0",
    "run.export_hf=false",
    "run.save_every=0",
    "run.steps=1000000",
    "run.heartbeat_timeout_s=60",
)
WARM_STEPS = 60
STEPS_AFTER = 40
PARTS = ("sync_ms", "wait_ms", "train_ms", "bus_ms")
DEADLINE_S = 120.0


def actor_steps(folder: Path) -> dict[int, dict[str, float]]:
    """Train step → the trainer's values."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record["values"] for record in records if record["source"] == "actor"}


def engine_version(pid: int) -> int:
    """The weight version that the engine of this process serves, by its own word."""
    port = next(one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.status == "LISTEN")
    with urlopen(f"http://127.0.0.1:{port}/model_info", timeout=DEADLINE_S) as answer:
        return int(json.load(answer)["weight_version"])


def newest_version(folder: Path) -> int:
    """The newest weight version that the trainer has reported."""
    return max(actor_steps(folder)) + 1


def measure(folder: Path, *, seconds: float, overrides: list[str]) -> None:
    with LiveRun(folder, *OVERRIDES, *overrides) as live:
        live.wait_step(WARM_STEPS)
        engines = [pid for pid, line in live.processes().items() if ENGINE in line]
        before = newest_version(folder)
        os.kill(engines[0], signal.SIGSTOP)
        time.sleep(seconds)
        stopped_at = newest_version(folder)
        os.kill(engines[0], signal.SIGCONT)
        began = time.monotonic()
        while engine_version(engines[0]) < newest_version(folder) - 1:
            assert time.monotonic() - began < DEADLINE_S, f"the engine serves {engine_version(engines[0])}"
            time.sleep(0.02)
        caught_up_s = time.monotonic() - began
        live.wait_step(newest_version(folder) + STEPS_AFTER)
        live.terminate()
        live.finish()
    steps = actor_steps(folder)
    usual = [values["step_ms"] for step, values in steps.items() if 10 <= step < before - 1]
    during = {step: values for step, values in steps.items() if step >= before - 1}
    longest = max(during, key=lambda step: during[step]["step_ms"])
    values = during[longest]
    parts = ", ".join(f"{part} {values[part]:,.0f}" for part in PARTS)
    print(f"median step {median(usual):.0f} ms; longest {values['step_ms']:,.0f} ms (step {longest}: {parts});")
    print(f"  {stopped_at - before} steps while the engine stood still; it caught up {caught_up_s:.2f} s after SIGCONT")
    slow = sorted((values["step_ms"] for values in during.values()), reverse=True)[:5]
    print("  the five longest steps, ms: " + ", ".join(f"{one:,.0f}" for one in slow), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the engine stands still")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="key=value of the runs")
    arguments = parser.parse_args()
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder) / "run", seconds=arguments.seconds, overrides=arguments.overrides)


if __name__ == "__main__":
    main()
