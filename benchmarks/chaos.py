"""Kills and freezes processes of runs: ``python -m benchmarks.chaos --kills 50 [--media see] [--env number_guess]
[--kinds engine …]``, ``--storm 1000`` (`benchmarks.chaos_storm`), ``--births`` (`benchmarks.chaos_births`).

The runs are real runs of the demo with all roles. At random moments, drawn by the seed, one process gets SIGKILL, each
time after training has continued since the last kill. For the kind ``frozen`` a random process gets SIGSTOP; for
``engine_and_owner`` an engine gets SIGSTOP and its owner SIGSTOP or SIGKILL. The run must kill stopped processes,
because they do not answer. Measured is the time from the signal to the next new train step (steps that are repeated
after going back to a checkpoint do not count), and to the third new step: at staleness 1 the rows of two steps may
exist already, so the third step shows that all processes work again. The ledger's file is checked event by event: no
sample may be lost or trained twice. With --media prompts have images and videos ("see"; "states": the engine keeps
layer states) or also sounds ("four_modalities"), and an encode worker is a victim, too. With --env the runs are games
of several turns in env workers, or of agents, which are victims, too. The program fails if a finished run leaves a
process, a folder in /tmp or files in /dev/shm. It prints the overrides, one line for each harm with the machine's load,
and a table by kind. Exit code 1 if anything went wrong.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import psutil

from benchmarks.chaos_births import KINDS, MOMENTS, Birth, births, births_table, usual_start_s
from benchmarks.chaos_runs import (
    CONTROLLER,
    ENDS,
    ENV_RUNS,
    FROZEN,
    HEARTBEAT_S,
    HUNG_S,
    IN_THE_PIPE,
    LAST_STEPS,
    MEDIA_RUNS,
    PAIR,
    POLL_S,
    RAY,
    RUNS,
    TEXT,
    TITLES,
    WITHOUT_END,
    HarmedRun,
    Training,
    find_process,
    let_train,
    parent_of,
    read_books,
)
from benchmarks.chaos_storm import Books, Draw, injuries, storm, storm_table, went_wrong
from relax_core.contracts.process_trees import EXITED, process_state
from tests.integration.live_run import LiveRun, run_to_end

NOTICE_S = 60.0  # after its heartbeat deadline, in which a stopped process must be killed, also on a busy machine
QUIET_END = "quiet end"  # failures that appear only after the last harm
KILLS_A_RUN = 10
SUCCESSOR_S = 0.5  # listing all processes of the machine takes CPU time that the run needs then
PERSISTED_S = 0.5  # until earlier events are in the ledger's file


@dataclass(frozen=True, kw_only=True)
class Harm:
    """Holds one harm and its result. ``victim``: kind of process and signal. ``at_step``: newest step before the harm.
    ``seconds``: time to the next new step; ``settled_s``: time to the third, which needs new rows; both None if the run
    did not survive. ``end``: state of the run. ``lost``, ``trained_twice``: samples, by the ledger's file.
    """

    kind: str
    victim: str
    at_step: int
    seconds: float | None
    settled_s: float | None
    end: str
    lost: int = 0
    trained_twice: int = 0


def do_harm(live: LiveRun, training: Training, kind: str, chance: random.Random, *, run: HarmedRun) -> Harm:
    """Harms one or two processes and waits until training continues, the run ends, or ``HUNG_S`` is over."""
    victim = chance.choice([one for one in run.processes if one != CONTROLLER]) if kind == FROZEN else kind
    blows = _blows(kind, victim, chance)
    pids = {one: find_process(live, one) for one, _ in blows}
    controller = find_process(live, CONTROLLER)
    event, began = training.last_event(), time.time()
    for one, number in blows:
        os.kill(pids[one], number)
    time.sleep(PERSISTED_S)
    before = training.newest_at(began)
    # The services of a killed controller train on for a moment; only the successor's steps show a recovery.
    since = _await_successor(live, controller) if victim in (CONTROLLER, *RAY) else began
    end, third = "survived", None
    while third is None:
        third = training.time_of(IN_THE_PIPE, behind=before, event=event, since=since)
        if third is None and (not live.running() or time.time() - began > HUNG_S):
            end = "hung" if live.running() else "ended"
            break
        time.sleep(POLL_S)
    first = training.time_of(0, behind=before, event=event, since=since)
    for one, number in blows:
        if number == signal.SIGSTOP and third is not None and not _is_killed(pids[one], stopped_at=began):
            end = "unnoticed"
            os.kill(pids[one], signal.SIGCONT)
    survived = first is not None and third is not None and end == "survived"
    return Harm(
        kind=kind,
        victim=", ".join(f"{one} {signal.Signals(number).name}" for one, number in blows),
        at_step=before,
        seconds=first - began if survived and first is not None else None,
        settled_s=third - began if survived and third is not None else None,
        end=end,
    )


def _blows(kind: str, victim: str, chance: random.Random) -> list[tuple[str, signal.Signals]]:
    """Returns (kind of process, signal) in sending order."""
    if kind == PAIR:
        return [("engine", signal.SIGSTOP), ("engine_owner", chance.choice([signal.SIGSTOP, signal.SIGKILL]))]
    return [(victim, signal.SIGSTOP if kind == FROZEN else signal.SIGKILL)]


def _await_successor(live: LiveRun, killed: int) -> float:
    """Waits for the next controller and returns the Unix time. The killed controller's services have ended by then."""
    deadline = time.monotonic() + HUNG_S
    while live.running() and time.monotonic() < deadline:
        if any(pid != killed and parent_of(pid) == live.pid and _is_controller(pid) for pid in live.processes()):
            break
        time.sleep(SUCCESSOR_S)
    return time.time()


def _is_controller(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return TITLES[CONTROLLER] in f"{' '.join(psutil.Process(pid).cmdline())} "
    return False


def _is_killed(pid: int, *, stopped_at: float) -> bool:
    """Returns whether the run kills a stopped process soon after its heartbeat deadline."""
    while not process_state(pid).startswith(EXITED):
        if time.time() - stopped_at > HEARTBEAT_S + NOTICE_S:
            return False
        time.sleep(POLL_S)
    return True


def harm_run(folder: Path, kinds: Sequence[str], *, seed: int, run: HarmedRun = RUNS[TEXT]) -> Iterator[Harm]:
    """Runs once with one harm for each of ``kinds``, in this order, then to the end without harm; yields the harms."""
    chance = random.Random(seed)
    training = Training(folder)
    lost = twice = 0
    with LiveRun(folder, *run.overrides, WITHOUT_END) as live:
        for kind in kinds:
            stood = let_train(live, training, chance)
            harm = (
                do_harm(live, training, kind, chance, run=run) if stood == "survived" else _none(kind, training, stood)
            )
            now_lost, now_twice = read_books(folder, run_over=False)
            yield replace(harm, lost=max(0, now_lost - lost), trained_twice=max(0, now_twice - twice))
            lost, twice = now_lost, now_twice
            if harm.end in ("hung", "ended"):
                print(live.output()[-4000:])
                live.kill_everything()
                break
        else:
            live.terminate()
            live.finish()
    steps = training.newest() + 1 + LAST_STEPS
    finished = run_to_end(folder, *run.overrides, f"run.steps={steps}", "resume=auto")
    at_end_lost, at_end_twice = read_books(folder, run_over=finished.code == 0)
    books = finished.summary.get("ledger", {})
    print(
        f"     run of {steps} steps: {at_end_lost} lost, {at_end_twice} trained twice; summary.json: {books}",
        flush=True,
    )
    if (at_end_lost, at_end_twice) != (lost, twice) or finished.code != 0:
        print(finished.output[-4000:])
        yield Harm(
            kind=QUIET_END,
            victim=f"exit code {finished.code}",
            at_step=steps,
            seconds=None,
            settled_s=None,
            end="survived" if finished.code == 0 else "ended",
            lost=at_end_lost - lost,
            trained_twice=at_end_twice - twice,
        )


def _none(kind: str, training: Training, end: str) -> Harm:
    return Harm(kind=kind, victim=f"before {kind}", at_step=training.newest(), seconds=None, settled_s=None, end=end)


def schedule(kinds: Sequence[str], *, kills: int, seed: int) -> list[str]:
    """Returns ``kills`` kinds in random order, distributed evenly."""
    chance = random.Random(seed)
    planned = [kinds[number % len(kinds)] for number in range(kills)]
    chance.shuffle(planned)
    return planned


def table(harms: Sequence[Harm]) -> str:
    """Returns a table by kind: counts, results, and seconds to the next new step."""
    lines = [
        "| kind | harms | survived | hung | ended | unnoticed | lost | trained twice "
        "| next step, s: p50 | max | third: p50 | max |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in (*dict.fromkeys(harm.kind for harm in harms), "all"):
        own = [harm for harm in harms if kind in (harm.kind, "all")]
        ends = [sum(harm.end == end for harm in own) for end in ENDS]
        times = (*_p50_max([harm.seconds for harm in own]), *_p50_max([harm.settled_s for harm in own]))
        counts = (len(own), *ends, sum(harm.lost for harm in own), sum(harm.trained_twice for harm in own))
        lines.append(f"| {kind} | {' | '.join(str(count) for count in counts)} | {' | '.join(times)} |")
    return "\n".join(lines)


def _p50_max(found: Sequence[float | None]) -> tuple[str, str]:
    seconds = [one for one in found if one is not None]
    return (f"{median(seconds):.1f}", f"{max(seconds):.1f}") if seconds else ("", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storm", type=int, metavar="DRAWS", help="draw this many injuries of all kinds in --runs")
    parser.add_argument("--runs", nargs="+", choices=tuple(RUNS), default=list(RUNS), help="runs of the storm")
    parser.add_argument("--births", action="store_true", help="harm starting processes")
    parser.add_argument("--moments", nargs="+", type=float, default=list(MOMENTS), help="delays after a start, in s")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--media", choices=MEDIA_RUNS, help="runs whose prompts have media; default: text")
    which.add_argument("--env", choices=ENV_RUNS, help="runs of several turns whose environment is in env workers")
    parser.add_argument("--kinds", nargs="+", help="default: every kind of the run")
    arguments = parser.parse_args()
    harmed = RUNS[arguments.media or arguments.env or TEXT]
    known: Sequence[str] = harmed.kinds
    if arguments.storm:
        known = sorted({kind for name in arguments.runs for kind in injuries(RUNS[name])})
    elif arguments.births:
        known = KINDS
    if unknown := sorted({*(arguments.kinds or ())} - {*known}):
        parser.error(f"there is no {', '.join(unknown)} here; there are {', '.join(known)}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="relax-chaos-") as folder:
        if arguments.storm:
            return _storm(Path(folder), arguments)
        if arguments.births:
            return _births(Path(folder), arguments)
        return _kills(Path(folder), arguments, harmed)


def _storm(folder: Path, arguments: argparse.Namespace) -> int:
    found: list[Draw | Books] = []
    for one in storm(folder, arguments.storm, runs=arguments.runs, only=arguments.kinds, seed=arguments.seed):
        found.append(one)
        print(f"{sum(isinstance(each, Draw) for each in found):>4}. {one} (load {os.getloadavg()[0]:.0f})", flush=True)
    print(storm_table(found))
    return int(went_wrong(found))


def _births(folder: Path, arguments: argparse.Namespace) -> int:
    found: list[Birth] = []
    start_s = usual_start_s(folder / "usual")
    print(f"usual start {start_s:.1f} s", flush=True)
    for birth in births(folder, arguments.kinds or KINDS, moments=arguments.moments):
        found.append(birth)
        print(f"{len(found):>3}. {birth} (load {os.getloadavg()[0]:.0f})", flush=True)
    print(births_table(found, start_s=start_s))
    return int(any(one.end != "survived" or one.lost or one.trained_twice for one in found))


def _kills(folder: Path, arguments: argparse.Namespace, harmed: HarmedRun) -> int:
    print(f"overrides: {' '.join(harmed.overrides)}")
    planned = schedule(arguments.kinds or harmed.kinds, kills=arguments.kills, seed=arguments.seed)
    harms: list[Harm] = []
    for number in itertools.count():
        if not planned:
            break
        run = harm_run(folder / f"run{number}", planned[:KILLS_A_RUN], seed=arguments.seed + number, run=harmed)
        for harm in run:
            harms.append(harm)
            planned = planned[harm.kind != QUIET_END :]
            print(f"{len(harms):>3}. {_words(harm)} (load {os.getloadavg()[0]:.0f})", flush=True)
    print(table(harms))
    return int(any(harm.end != "survived" or harm.lost or harm.trained_twice for harm in harms))


def _words(harm: Harm) -> str:
    words = f"{harm.victim} at step {harm.at_step}: {harm.end}"
    if harm.seconds is None or harm.settled_s is None:
        return words
    return f"{words}, next step after {harm.seconds:.1f} s, third after {harm.settled_s:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
