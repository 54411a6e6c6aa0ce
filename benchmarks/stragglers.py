"""Measures straggler detection: whether a run reports exactly the rank or engine that was slowed down.

    python -m benchmarks.stragglers [--runs 10] [--only ranks engines undisturbed] [--ranks 4 --engines 3 --share 0.3]

Each run is a real run with ``--ranks`` data-parallel trainer ranks and ``--engines`` engines. At a random train step
the benchmark slows down one rank or one engine: it sends SIGSTOP and SIGCONT alternately, so the process is stopped for
``--share`` of the time. Prints the number of train steps until the report, the report, and false alarms. An undisturbed
run has ``--steps`` train steps. The exit code is 1 unless each slowed process is reported within 60 steps and there are
no false alarms.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from relax_core.observe.event_log import ACTOR, RANK, by_step, read_metrics, read_texts
from relax_core.observe.stragglers import STRAGGLER, Straggler, reported_stragglers, straggler_text
from relax_core.observe.trackers.file_sinks import METRICS_FILE
from tests.integration.live_run import ENGINE, LiveRun

OVERRIDES = (
    "mode=async",
    "mode.max_staleness=1",
    "eval.every=0",
    "run.export_hf=false",
    "run.save_every=0",
    "run.steps=1000000",
    "tracker.tensorboard=false",
    "rollout.prompts_per_step=48",
    "algo.group_size=16",
)
# Duration of one stop and one continuation together. On overloaded cores the scheduler compensates a process for a stop
# of a few ms, so a shorter period would not slow it down.
PERIOD_S = 0.25
EARLIEST, LATEST = 20, 60  # the slowing begins between these train steps
WITHIN = 60  # maximum train steps until the report
MORE_STEPS = 100  # a run without a report ends this many steps after the slowing began
LOOK_S = 0.2
RANKS, ENGINES, UNDISTURBED = "ranks", "engines", "undisturbed"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Holds the result of a run: the slowed process, the first slow step, the steps until the report, all reports."""

    who: str
    began: int
    named_after: int | None
    told: Sequence[Straggler]

    @property
    def others(self) -> list[Straggler]:
        """Returns the false alarms."""
        return [straggler for straggler in self.told if straggler.who != self.who or straggler.to_step < self.began]

    @property
    def good(self) -> bool:
        """Returns whether the slowed process was reported in time, without false alarms."""
        in_time = not self.who or (self.named_after is not None and self.named_after <= WITHIN)
        return in_time and not self.others


class Slowed:
    """Context manager that stops a process for a share of the time."""

    def __init__(self, pid: int, *, share: float) -> None:
        self._pid, self._share = pid, share
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._slow, name="slow", daemon=True)

    def __enter__(self) -> Slowed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _slow(self) -> None:
        with suppress(PermissionError):  # a high priority keeps the signals in time on a busy machine, if permitted
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_RR, os.sched_param(1))
        with suppress(ProcessLookupError):  # the run has ended
            while not self._ended.is_set():
                os.kill(self._pid, signal.SIGSTOP)
                time.sleep(self._share * PERIOD_S)
                os.kill(self._pid, signal.SIGCONT)
                time.sleep((1.0 - self._share) * PERIOD_S)
            os.kill(self._pid, signal.SIGCONT)


def step_of(folder: Path) -> int:
    """Returns the newest train step that the trainer has reported, or -1."""
    try:
        return max(by_step(read_metrics(folder), ACTOR), default=-1)
    except ValueError:  # a line is being written
        return -1


def process_of(live: LiveRun, who: str) -> int:
    """Returns the pid of a rank or of an engine: the process with the open log file."""
    log = str(live.folder / "logs" / f"{who}.log")
    engine = who.startswith("engine")
    for pid, line in live.processes().items():
        if engine != (ENGINE in line):
            continue
        with suppress(OSError):
            if any(os.readlink(link) == log for link in Path(f"/proc/{pid}/fd").iterdir()):
                return pid
    raise SystemExit(f"no process writes {log}")


def run_case(kind: str, given: argparse.Namespace, *, seed: int) -> Case:
    """Executes one run and returns its result."""
    chance = random.Random(seed)
    slowed = {RANKS: f"actor-{chance.randrange(given.ranks)}", ENGINES: f"engine-{chance.randrange(given.engines)}"}
    who, start = slowed.get(kind, ""), chance.randrange(EARLIEST, LATEST)
    settings = (f"parallel.dp={given.ranks}", f"engine.count={given.engines}", f"seed={seed}", *given.overrides)
    with tempfile.TemporaryDirectory() as folder, LiveRun(Path(folder) / "run", *OVERRIDES, *settings) as live:
        if not who:
            _wait_step(live, given.steps)
            return _ended(live, given, who="", began=0, named_at=None)
        _wait_step(live, start)
        pid, began = process_of(live, who), step_of(live.folder)
        with Slowed(pid, share=given.share):
            named_at = None
            while named_at is None and step_of(live.folder) < began + MORE_STEPS:
                time.sleep(LOOK_S)
                records = [record for record in read_metrics(live.folder) if record.source == STRAGGLER]
                named_at = next((record.step for record in records if f"{who}/slower" in record.values), None)
        return _ended(live, given, who=who, began=began, named_at=named_at)


def _wait_step(live: LiveRun, step: int) -> None:
    live.wait_for(f"step {step}", lambda: _slept(LOOK_S) and step_of(live.folder) >= step)


def _slept(seconds: float) -> bool:
    time.sleep(seconds)
    return True


def _ended(live: LiveRun, given: argparse.Namespace, *, who: str, began: int, named_at: int | None) -> Case:
    live.terminate()
    done = live.finish()
    told = reported_stragglers(read_texts(done.folder))
    assert len(done.summary["stragglers"]) == len(told), "summary.json has them, too"
    _print_times(done.folder)
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
        shutil.copy(done.folder / METRICS_FILE, given.keep / f"{who or UNDISTURBED}-{began}-{time.time():.0f}.jsonl")
    return Case(who=who, began=began, named_after=None if named_at is None else named_at - began, told=told)


def _print_times(folder: Path) -> None:
    """Prints the duration of the steps, and the time that each rank works in a step."""
    records = read_metrics(folder)
    steps = [values["step_ms"] for values in by_step(records, ACTOR).values()]
    names = sorted({name.split("/")[0] for record in records if record.source == RANK for name in record.values})
    own = {
        name: [
            sum(record.get(f"{name}/{part}_ms", 0.0) for part in ("pack", "forward", "sums", "backward"))
            for record in of
        ]
        for of in [list(by_step(records, RANK).values())]
        for name in names
    }
    message = ", ".join(f"{name} {sum(ms) / len(ms):.0f}" for name, ms in own.items())
    print(f"    {len(steps)} steps of {sum(steps) / len(steps):.0f} ms; own work of a step, ms: {message}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="runs of each kind")
    parser.add_argument(
        "--only", nargs="+", choices=[RANKS, ENGINES, UNDISTURBED], default=[RANKS, ENGINES, UNDISTURBED]
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.3, help="share of the time that a process is stopped")
    parser.add_argument("--steps", type=int, default=150, help="train steps of an undisturbed run")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--keep", type=Path, help="folder for the metrics.jsonl of each run")
    parser.add_argument("overrides", nargs="*", help="overrides of the runs, key=value")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so the current run ends, too
    missed = 0
    for kind in given.only:
        good = 0
        for run in range(given.runs):
            case = run_case(kind, given, seed=given.seed + run)
            good += case.good
            what = "undisturbed" if not case.who else f"{case.who} slowed from step {case.began} on"
            when = "" if not case.who else f": reported after {case.named_after} steps"
            print(f"  {kind} {run + 1}: {what}{when}; {len(case.others)} false alarms", flush=True)
            for straggler in case.told:
                print(f"    {straggler_text(straggler)}", flush=True)
        print(f"{kind}: {good} of {given.runs} good", flush=True)
        missed += given.runs - good
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
