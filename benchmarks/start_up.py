"""Measures the time of starts and recoveries: ``python -m benchmarks.start_up [--runs 3] [--kills 2] [key=value …]``.

The runs are text demos. The benchmark measures the seconds from the command to the engine's first token and to the
first train step, and from a SIGKILL of the trainer to the first train step of the next trainer, which resumes from the
newest checkpoint. It prints medians for each process: the start time, and the CPU time until the first train step or
since the kill. It also prints the machine's load, because elapsed time depends on the load more than CPU time does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Event, Thread

import psutil

from benchmarks.chaos_runs import Training, find_process
from tests.integration.live_run import LiveRun
from tests.ports import free_port

OVERRIDES = (
    "mode=async",
    "run.steps=1000000",
    "run.save_every=10",
    "run.max_recoveries=100",
    "run.export_hf=false",
    "eval.every=0",
)
LOOK_S = 0.2  # seconds between two observations of the processes
LOAD_S = 60.0  # timeout of an engine's response; the engine responds between two decode steps
STEPS_BETWEEN = 30  # train steps before a kill
TRAINER = "actor_rank_0"
# The error of psutil's boot time, which psutil rounds to seconds.
CLOCK_S = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - psutil.boot_time()


@dataclass
class Phase:
    """Holds the seconds of a start or a recovery, and the start time and the CPU time of each process."""

    seconds: float = 0.0
    token_s: float = 0.0  # seconds until the first token; 0 for a recovery
    born: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """Holds the newest observation of one process: name, Unix time of the start, and CPU seconds so far."""

    name: str
    born: float
    cpu_s: float


class Looks:
    """Observes the processes of a run from a thread, to include processes that end."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._ended = Event()
        self._found: dict[int, Look] = {}

    @contextmanager
    def going_on(self) -> Iterator[Looks]:
        """Observes the processes repeatedly while the block runs."""
        thread = Thread(target=self._look_on)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()

    def now(self) -> Mapping[int, Look]:
        """Observes the processes once. Returns every process observed so far by pid."""
        for pid, command in self._live.processes().items():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                times = process.cpu_times()
                name = process_name(process.name(), command)
                self._found[pid] = Look(name, process.create_time() + CLOCK_S, times.user + times.system)
        return self._found.copy()

    def _look_on(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.now()


def process_name(short: str, command: str) -> str:
    """Returns the name of a process: Ray's class, the controller, the module, or else the program."""
    if short == "relax-control":
        return short
    found = re.match(r"ray::[A-Za-z_]+", command) or re.search(r"-m \S+", command) or re.search(r"[\w-]+\.py", command)
    return found[0] if found else os.path.basename(command.split(" ", 1)[0])


def phase(before: Mapping[int, Look], after: Mapping[int, Look], *, began: float, ended: float) -> Phase:
    """Returns the processes' CPU time between two observations. ``began`` and ``ended`` are Unix times."""
    found = Phase(seconds=ended - began)
    count: dict[str, int] = defaultdict(int)
    for pid, look in sorted(after.items(), key=lambda item: item[1].born):
        took = look.cpu_s - (before[pid].cpu_s if pid in before else 0.0)
        if pid in before and took < 0.05:  # skips an idle process
            continue
        count[look.name] += 1
        name = look.name if count[look.name] == 1 else f"{look.name} ({count[look.name]})"
        found.cpu_s[name] = took
        if pid not in before:
            found.born[name] = look.born - began
    return found


def measure(folder: Path, *, kills: int, overrides: Sequence[str]) -> tuple[Phase, list[Phase]]:
    """Measures the start of one run, and the recovery after each of ``kills`` kills of the trainer."""
    began, training = time.time(), Training(folder)
    port = free_port()
    with LiveRun(folder, *OVERRIDES, f"engine.port={port}", *overrides) as live, Looks(live).going_on() as looks:
        token = _await(live, lambda: _first_token(port))
        ended = _await(live, lambda: training.first_step_time(since=began))
        start, recoveries = phase({}, looks.now(), began=began, ended=ended), []
        start.token_s = token - began
        for _ in range(kills):
            goal = training.newest() + STEPS_BETWEEN
            live.wait_for(f"step {goal}", lambda goal=goal: training.newest() >= goal)  # type: ignore[misc]
            recoveries.append(_recovery(live, training, looks))
        live.terminate()
        live.finish()
    return start, recoveries


def _recovery(live: LiveRun, training: Training, looks: Looks) -> Phase:
    trainer = find_process(live, TRAINER)
    before, began = looks.now(), time.time()
    os.kill(trainer, signal.SIGKILL)

    def successor() -> float | None:
        found = find_process(live, TRAINER)
        return None if found == trainer else found

    since = psutil.Process(int(_await(live, successor))).create_time() + CLOCK_S
    ended = _await(live, lambda: training.first_step_time(since=since))
    return phase(before, looks.now(), began=began, ended=ended)


def _first_token(port: int) -> float | None:
    """Returns the present Unix time if the embedded engine at this port has sampled a token, otherwise None."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/loads", timeout=LOAD_S) as reply:
            drawn = json.load(reply)["loads"][0]["generated_tokens"]
    except OSError:  # the engine does not listen yet
        return None
    return time.time() if drawn else None


def _await(live: LiveRun, found: Callable[[], float | None]) -> float:
    """Calls ``found`` until its result is not None, and returns this result."""
    answers: list[float] = []

    def came() -> bool:
        answer = found()
        answers.extend([] if answer is None else [answer])
        return bool(answers)

    live.wait_for("a train step", came)
    return answers[0]


def table(title: str, phases: Sequence[Phase]) -> str:
    """Returns the medians of several starts, or of several recoveries, by process."""
    seconds = sorted(start_phase.seconds for start_phase in phases)
    total = median(sum(start_phase.cpu_s.values()) for start_phase in phases)
    lines = [f"{title}: {median(seconds):.1f} s ({seconds[0]:.1f} to {seconds[-1]:.1f}), {total:.1f} CPU seconds"]
    lines += ["| process | started after, s | CPU seconds |", "|---|---|---|"]
    names = {name: None for start_phase in phases for name in start_phase.cpu_s}
    cpu_s = {name: median(start_phase.cpu_s.get(name, 0.0) for start_phase in phases) for name in names}
    for name in sorted(names, key=lambda name: -cpu_s[name]):
        born = [start_phase.born[name] for start_phase in phases if name in start_phase.born]
        lines.append(f"| {name} | {f'{median(born):.1f}' if born else ''} | {cpu_s[name]:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=2, help="kills of the trainer in each run")
    parser.add_argument("overrides", nargs="*", help="overrides of the runs, key=value")
    arguments = parser.parse_args()
    starts: list[Phase] = []
    recoveries: list[Phase] = []
    for number in range(arguments.runs):
        with tempfile.TemporaryDirectory(prefix="relax-start-") as folder:
            start, after = measure(Path(folder) / "run", kills=arguments.kills, overrides=arguments.overrides)
        starts.append(start)
        recoveries += after
        message = ", ".join(
            f"{begun.seconds:.1f} s and {sum(begun.cpu_s.values()):.1f} CPU s" for begun in (start, *after)
        )
        print(f"run {number + 1}: {message} (load {os.getloadavg()[0]:.1f})", flush=True)
    print(f"first token: {median(begun.token_s for begun in starts):.1f} s")
    print(table("first train step", starts))
    if recoveries:
        print(table("a train step after the trainer's loss", recoveries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
