"""Harm to processes that start: ``python -m benchmarks.chaos_births [--kinds gateway …] [--moments 0 0.3 1]``.

For each kind of process, signal (SIGKILL, SIGSTOP) and moment after the process appears, a real run of the demo is
harmed twice: the first process of the kind while the run starts, and its successor after the running process was killed
(so that a process is lost within a recovery). Then the run trains to its end. Measured is the time from the harm until
a train step is done that was never done before, and its ratio to the usual start: the seconds from the command to the
first train step of a run without harm in the same invocation. The ledger's file is read back: nothing may be lost or
trained twice. Prints a line for each harm and a table. Exit code 1 if anything went wrong.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.chaos import ENDS, HUNG_S, read_books
from benchmarks.chaos_runs import CONTROLLER, OF_SOME_RUNS, POLL_S, RAY, RUNS, TEXT, TITLES, Training, parent_of
from tests.integration.live_run import LiveRun

KINDS = {
    **{kind: title for kind, title in TITLES.items() if kind not in (*OF_SOME_RUNS, CONTROLLER)},
    "gateway": "relax_core.server.gateway_server",
    "fork_server": "relax_core.control.host.fork_server",
    "forked_worker": "relax_core.control.host.fork_server",  # a fork of it that has no title of Ray yet
}
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
MOMENTS = (0.0, 0.1, 0.3, 1.0, 2.0)
APPEAR_S = 120.0
STEPS_BETWEEN = 5
LAST_STEPS = 5
WITHOUT_END = "run.steps=1000000"


@dataclass(frozen=True, kw_only=True)
class Birth:
    """Is one harm at a birth. ``seconds`` is the time until the next new train step, None if it did not come."""

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


def newborn(live: LiveRun, kind: str, *, known: set[int]) -> int | None:
    """Waits for a process of the kind that is not in ``known``; returns its pid, or None if the run ends first."""
    deadline = time.monotonic() + APPEAR_S
    while live.running() and time.monotonic() < deadline:
        for pid in members(live, kind):
            if pid not in known:
                return pid
        time.sleep(POLL_S)
    return None


def members(live: LiveRun, kind: str) -> set[int]:
    """Returns the living processes of a kind."""
    lines = live.processes()
    found = {pid for pid, line in lines.items() if KINDS[kind] in f"{line} "}
    if kind == "forked_worker":
        return {pid for pid in found if parent_of(pid) in found}
    if kind in RAY:  # not what it has just forked off, which has its title for a moment
        return {pid for pid in found if parent_of(parent_of(pid)) == live.pid}
    return {pid for pid in found if parent_of(pid) not in found}


def harm(live: LiveRun, pid: int, number: signal.Signals, *, moment_s: float) -> float:
    """Sends the signal at the moment after the birth and returns the Unix time."""
    time.sleep(moment_s)
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    return time.time()


def next_step(live: LiveRun, training: Training, *, since: float, event: int) -> tuple[str, float | None]:
    """Waits until a step is done that was never done before; returns how the run stands, and the seconds."""
    behind = training.newest_at(since)
    while True:
        if (done := training.time_of(0, behind=behind, event=event, since=since)) is not None:
            return "survived", done - since
        if not live.running() or time.time() - since > HUNG_S:
            return "hung" if live.running() else "ended", None
        time.sleep(POLL_S)


def birth_run(folder: Path, kind: str, number: signal.Signals, moment_s: float) -> Iterator[Birth]:
    """Runs once, with harm at the start and to the successor of a process that was killed."""
    training = Training(folder)
    with LiveRun(folder, *RUNS[TEXT].overrides, WITHOUT_END) as live:
        for phase in ("start", "recovery"):
            known: set[int] = set()
            if phase == "recovery":
                goal = training.newest() + STEPS_BETWEEN
                while training.newest() < goal and live.running():
                    time.sleep(POLL_S)
                known = members(live, kind)
                if not known:  # forks that have their titles by now; any worker brings a new fork
                    known, killed = set(), max(members(live, "rollout"))
                else:
                    killed = max(known)
                with suppress(ProcessLookupError):
                    os.kill(killed, signal.SIGKILL)
            if (pid := newborn(live, kind, known=known)) is None:
                yield Birth(kind=kind, number=number, moment_s=moment_s, phase=phase, end="unnoticed")
                break
            event = training.last_event()
            end, seconds = next_step(live, training, since=harm(live, pid, number, moment_s=moment_s), event=event)
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
    lost, twice = read_books(folder, run_over=False)  # what was in flight at the stop is not over
    if finished.code != 143 or lost or twice:
        print(finished.output[-6000:], flush=True)
        end = "survived" if finished.code == 143 else "ended"
        yield Birth(kind=kind, number=number, moment_s=moment_s, phase="end", end=end, lost=lost, trained_twice=twice)


def usual_start_s(folder: Path) -> float:
    """Returns the seconds from the command to the first train step of a run without harm."""
    training, began = Training(folder), time.time()
    with LiveRun(folder, *RUNS[TEXT].overrides, "run.steps=3") as live:
        _, seconds = next_step(live, training, since=began, event=0)
        live.finish()
    assert seconds is not None, "a run without harm trains"
    return seconds


def table(births: Sequence[Birth], *, start_s: float) -> str:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--moments", nargs="+", type=float, default=list(MOMENTS), help="seconds after the birth")
    parser.add_argument(
        "--signals", nargs="+", choices=[one.name for one in SIGNALS], default=[one.name for one in SIGNALS]
    )
    given = parser.parse_args()
    births: list[Birth] = []
    with tempfile.TemporaryDirectory(prefix="relax-births-") as folder:
        start_s = usual_start_s(Path(folder) / "usual")
        print(f"usual start {start_s:.1f} s; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
        for kind in given.kinds:
            for name in given.signals:
                for moment_s in given.moments:
                    run = Path(folder) / f"run{len(births)}"
                    for birth in birth_run(run, kind, signal.Signals[name], moment_s):
                        births.append(birth)
                        print(f"{len(births):>3}. {birth} (load {os.getloadavg()[0]:.0f})", flush=True)
    print(table(births, start_s=start_s))
    return int(any(one.end != "survived" or one.lost or one.trained_twice for one in births))


if __name__ == "__main__":
    sys.exit(main())
