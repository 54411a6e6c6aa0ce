"""Kills and stops starting processes: ``python -m benchmarks.chaos --births [--kinds gateway …] [--moments 0 0.3 1]``.

For each kind of process, signal (SIGKILL, SIGSTOP) and delay after the process appears, a real run of the demo is
harmed twice: the first process of the kind while the run starts, and its successor after the running process was killed
(so that a process is lost during a recovery). Then the run is stopped in order. Measured is the time from the signal to
the next new train step, and its ratio to the usual start: the seconds from the command to the first train step of a run
without harm in the same invocation. The ledger's file is checked: no sample may be lost or trained twice. Prints a line
for each harm and a table. Exit code 1 if anything went wrong.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.chaos_runs import (
    CONTROLLER,
    ENDS,
    FORKED_WORKER,
    OF_SOME_RUNS,
    RUNS,
    TEXT,
    TITLES,
    WITHOUT_END,
    Training,
    find_process,
    let_train,
    members,
    new_step,
    newborn,
    read_books,
)
from tests.integration.live_run import LiveRun

KINDS = (*(kind for kind in TITLES if kind not in (*OF_SOME_RUNS, CONTROLLER)), FORKED_WORKER)
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
MOMENTS = (0.0, 0.1, 0.3, 1.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class Birth:
    """Holds one harm to a starting process. ``seconds`` is the time to the next new train step, None without one."""

    kind: str
    number: signal.Signals
    moment_s: float
    phase: str
    end: str
    seconds: float | None = None
    lost: int = 0
    trained_twice: int = 0

    def __str__(self) -> str:
        after = "" if self.seconds is None else f", next step after {self.seconds:.1f} s"
        when = f"{self.moment_s:g} s after its birth ({self.phase})"
        return f"{self.kind} {self.number.name} {when}: {self.end}{after}; lost {self.lost}, twice {self.trained_twice}"


def harm(live: LiveRun, pid: int, number: signal.Signals, *, moment_s: float) -> float:
    """Sends the signal ``moment_s`` after the process appeared and returns the Unix time."""
    time.sleep(moment_s)
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    return time.time()


def birth_run(folder: Path, kind: str, number: signal.Signals, moment_s: float) -> Iterator[Birth]:
    """Runs once: harms a process of the kind at the start, then the successor of a killed one."""
    training = Training(folder)
    with LiveRun(folder, *RUNS[TEXT].overrides, WITHOUT_END) as live:
        for phase in ("start", "recovery"):
            known: set[int] = set()
            if phase == "recovery":
                let_train(live, training, random.Random(0))
                known = members(live, kind)
                with suppress(ProcessLookupError):  # the loss of any worker leads to a new fork
                    os.kill(find_process(live, "rollout" if kind == FORKED_WORKER else kind), signal.SIGKILL)
            if (pid := newborn(live, kind, known=known)) is None:
                yield Birth(kind=kind, number=number, moment_s=moment_s, phase=phase, end="unnoticed")
                break
            event = training.last_event()
            end, seconds = new_step(live, training, since=harm(live, pid, number, moment_s=moment_s), event=event)
            lost, twice = read_books(folder, run_over=False)
            yield Birth(
                kind=kind,
                number=number,
                moment_s=moment_s,
                phase=phase,
                end=end,
                seconds=seconds,
                lost=lost,
                trained_twice=twice,
            )
            if end != "survived":
                print(live.output()[-6000:], flush=True)
                live.kill_everything()
                return
        live.terminate()
        finished = live.finish()
    lost, twice = read_books(folder, run_over=False)  # samples in flight at the stop are still open
    if finished.code != 143 or lost or twice:
        print(finished.output[-6000:], flush=True)
        end = "survived" if finished.code == 143 else "ended"
        yield Birth(kind=kind, number=number, moment_s=moment_s, phase="end", end=end, lost=lost, trained_twice=twice)


def usual_start_s(folder: Path) -> float:
    """Returns the seconds from the command to the first train step of a run without harm."""
    training, began = Training(folder), time.time()
    with LiveRun(folder, *RUNS[TEXT].overrides, "run.steps=3") as live:
        _, seconds = new_step(live, training, since=began, event=0)
        live.finish()
    assert seconds is not None, "a run without harm trains"
    return seconds


def births_table(births: Sequence[Birth], *, start_s: float) -> str:
    """Returns the table by kind and signal."""
    lines = [
        f"| process | signal | births | {' | '.join(ENDS)} | lost | twice "
        "| next step, s: p50 | max | max / usual start |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, number in dict.fromkeys((one.kind, one.number) for one in births):
        own = [one for one in births if (one.kind, one.number) == (kind, number)]
        counts = [sum(one.end == end for one in own) for end in ENDS]
        totals = [sum(one.lost for one in own), sum(one.trained_twice for one in own)]
        seconds = [one.seconds for one in own if one.seconds is not None]
        times = (
            (f"{median(seconds):.1f}", f"{max(seconds):.1f}", f"{max(seconds) / start_s:.1f}") if seconds else ("",) * 3
        )
        lines.append(f"| {' | '.join(map(str, (kind, number.name, len(own), *counts, *totals, *times)))} |")
    return "\n".join(lines)


def births(folder: Path, kinds: Sequence[str], *, moments: Sequence[float]) -> Iterator[Birth]:
    """Harms starting processes of each kind with each signal after each delay."""
    for number, (kind, one, moment_s) in enumerate(itertools.product(kinds, SIGNALS, moments)):
        yield from birth_run(folder / f"run{number}", kind, one, moment_s)
