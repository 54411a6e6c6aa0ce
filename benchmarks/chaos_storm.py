"""Random fault injection (``benchmarks.chaos --storm``): draws injuries for any kind of run at any phase.

An injury is an entry of `injuries`: a process is killed or stopped at any moment, at its start, during a checkpoint or
a publication; two processes at once; a full disk; a lock on the ledger; no free file descriptor; a damaged checkpoint;
signals to all processes. `storm` draws a run and `DRAWS_A_RUN` injuries for it, inflicts them one after the other, and
lets the run end without further harm. After an injury that ends the run, such as SIGKILL to all processes, the command
is started again with ``resume=auto``. Lost and twice trained samples are counted by SQL in this file.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos_runs import (
    CONTROLLER,
    FORKED_WORKER,
    HUNG_S,
    IN_THE_PIPE,
    LAST_STEPS,
    POLL_S,
    RAY,
    RUNS,
    WITHOUT_END,
    HarmedRun,
    Training,
    find_process,
    let_train,
    members,
    new_step,
    newborn,
)
from relax_core.contracts.process_trees import kill
from tests.integration.live_run import LiveRun
from tests.outages import filled, locked

DRAWS_A_RUN = 10
OUTAGES_S = (2.0, 8.0, 15.0)
DISK_MIB = 512
LATEST_BIRTH_S = 2.0  # within which a process usually answers
PHASE_S = 60.0  # deadline of the wait for a phase, such as a checkpoint
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP


class NotMet(Exception):
    """The injury could not be inflicted, because its precondition was not met in time."""


@dataclass(kw_only=True)
class Scene:
    """Holds one run under harm. ``live`` is its newest command. ``words`` describe the newest injury."""

    folder: Path
    run: HarmedRun
    chance: random.Random
    training: Training
    live: LiveRun
    words: list[str] = field(default_factory=list)

    def process(self, kinds: Sequence[str] | None = None) -> tuple[str, int]:
        """Returns a random living process of the run."""
        kind = self.chance.choice(kinds or self.run.processes)
        return kind, find_process(self.live, kind)

    def send(self, kind: str, pid: int, number: signal.Signals) -> None:
        """Sends a signal to a process, which may have ended."""
        self.words.append(f"{number.name} to {kind}")
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def number(self) -> signal.Signals:
        """Returns SIGKILL or SIGSTOP."""
        return self.chance.choice((KILLED, STOPPED))

    def again(self) -> None:
        """Ends the remaining processes of the run and starts the command again."""
        with suppress(AssertionError):
            self.live.finish(deadline_s=HUNG_S)
        self.live.__exit__()
        self.live = LiveRun(self.folder, *self.run.overrides, WITHOUT_END, "resume=auto")


def _wait(what: str, found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PHASE_S
    while not found():
        if time.monotonic() > deadline:
            raise NotMet(f"{what} did not come within {PHASE_S:g} s")
        time.sleep(POLL_S)


# -- Injuries ---------------------------------------------------------------------------------------------------------
Inflict = Callable[[Scene], None]


def signalled(kind: str, number: signal.Signals) -> Inflict:
    """Sends a signal to a kind's newest process. After the loss of a controller it waits for the next controller."""

    def inflict(scene: Scene) -> None:
        controllers = members(scene.live, CONTROLLER)
        scene.send(kind, find_process(scene.live, kind), number)
        if kind in (CONTROLLER, *RAY):
            newborn(scene.live, CONTROLLER, known=controllers)

    return inflict


def born(kind: str, number: signal.Signals) -> Inflict:
    """Kills a process and sends a signal to its successor before or soon after its first answer."""

    def inflict(scene: Scene) -> None:
        known = members(scene.live, kind)
        kill(find_process(scene.live, "rollout" if kind == FORKED_WORKER else kind))
        pid = newborn(scene.live, kind, known=known)
        if pid is None:
            raise NotMet(f"no successor of {kind}")
        delay_s = scene.chance.uniform(0.0, LATEST_BIRTH_S)
        time.sleep(delay_s)
        scene.send(f"{kind} {delay_s:.1f} s after its birth", pid, number)

    return inflict


def pair(scene: Scene) -> None:
    """Harms two processes within a second."""
    for kind, pid in [scene.process() for _ in range(2)]:
        scene.send(kind, pid, scene.number())
        time.sleep(scene.chance.uniform(0.0, 1.0))


def engine_and_owner(scene: Scene) -> None:
    """Stops an engine, and stops or kills its owner."""
    scene.send("engine", find_process(scene.live, "engine"), STOPPED)
    scene.send("engine_owner", find_process(scene.live, "engine_owner"), scene.number())


def in_checkpoint(scene: Scene) -> None:
    """Harms a process while a checkpoint is written."""
    kind, pid = scene.process()
    _wait("a checkpoint", lambda: any((scene.folder / "checkpoints").glob(".step_*.partial")))
    scene.send(f"{kind} in a checkpoint", pid, scene.number())


def in_publication(scene: Scene) -> None:
    """Harms a process when a weight version appears."""
    kind, pid = scene.process()
    versions = [folder for folder in scene.live.places() if folder.parent == Path("/dev/shm")]
    before = {file for folder in versions for file in folder.rglob("*")}
    _wait("a weight version", lambda: bool({file for folder in versions for file in folder.rglob("*")} - before))
    scene.send(f"{kind} at a publication", pid, scene.number())


def full_disk(scene: Scene) -> None:
    """Fills the disk for some seconds."""
    seconds = scene.chance.choice(OUTAGES_S)
    scene.words.append(f"full disk for {seconds:g} s")
    with filled(scene.folder.parent):
        time.sleep(seconds)


def ledger_locked(scene: Scene) -> None:
    """Holds a lock on the ledger for some seconds, as a backup does."""
    seconds = scene.chance.choice(OUTAGES_S)
    scene.words.append(f"ledger locked for {seconds:g} s")
    with locked(scene.folder / "ledger.sqlite"):
        time.sleep(seconds)


def no_descriptor(scene: Scene) -> None:
    """Prevents a process from opening files for some seconds."""
    kind, pid = scene.process()
    seconds = scene.chance.choice(OUTAGES_S)
    scene.words.append(f"no descriptor for {kind} for {seconds:g} s")
    with suppress(ProcessLookupError, FileNotFoundError):
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), before[1]))
        time.sleep(seconds)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def damaged_checkpoint(scene: Scene) -> None:
    """Changes bytes of a random file of the newest checkpoint and kills the trainer."""
    checkpoints = scene.folder / "checkpoints"
    _wait("a second checkpoint", lambda: len(list(checkpoints.glob("step_*/meta.json"))) > 1)
    folders = sorted(checkpoints.glob("step_*/meta.json"))
    file = scene.chance.choice(sorted(one for one in folders[-1].parent.rglob("*") if one.is_file()))
    data = bytearray(file.read_bytes())
    place = scene.chance.randrange(max(1, len(data)))
    data[place : place + 8] = b"damaged!"
    file.write_bytes(data)
    scene.words.append(f"damaged {file.relative_to(scene.folder)}")
    scene.send("actor_rank_0", find_process(scene.live, "actor_rank_0"), KILLED)


def owners_killed(scene: Scene) -> None:
    """Kills supervisor and controller at the same time and starts the command again."""
    scene.words.append("SIGKILL to supervisor and controller")
    scene.live.kill_owners()
    scene.again()


def everything_killed(scene: Scene) -> None:
    """Kills all processes and starts the command again."""
    scene.words.append("SIGKILL to all processes")
    scene.live.kill_everything()
    scene.again()


def interrupted(number: signal.Signals) -> Inflict:
    """Sends a stop signal to all processes, which ends the run in order, and starts the command again."""

    def inflict(scene: Scene) -> None:
        scene.words.append(f"{number.name} to all processes")
        scene.live.signal_all(number)
        scene.again()

    return inflict


def injuries(run: HarmedRun) -> dict[str, Inflict]:
    """Returns the injuries of a kind of run: name → function that inflicts it."""
    found: dict[str, Inflict] = {}
    for kind in run.processes:
        for verb, number in (("kill", KILLED), ("stop", STOPPED)):
            found[f"{verb} {kind}"] = signalled(kind, number)
            if kind not in (CONTROLLER, *RAY):  # their successors start with the next controller
                found[f"{verb} {kind} at birth"] = born(kind, number)
    for verb, number in (("kill", KILLED), ("stop", STOPPED)):
        found[f"{verb} a forked worker"] = born(FORKED_WORKER, number)
    return {
        **found,
        "pair": pair,
        "engine and owner": engine_and_owner,
        "in a checkpoint": in_checkpoint,
        "at a publication": in_publication,
        "full disk": full_disk,
        "ledger locked": ledger_locked,
        "no descriptor": no_descriptor,
        "damaged checkpoint": damaged_checkpoint,
        "supervisor and controller killed": owners_killed,
        "everything killed": everything_killed,
        "SIGINT to all": interrupted(signal.SIGINT),
        "SIGTERM to all": interrupted(signal.SIGTERM),
    }


# -- Draws ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Draw:
    """Holds one injury of a run and its result.

    ``seconds`` is the time from the injury's end to the third new train step. The rows of two may exist already.
    """

    kind: str
    run: str
    words: str
    at_step: int
    end: str
    seconds: float | None = None

    def __str__(self) -> str:
        after = "" if self.seconds is None else f", third new step after {self.seconds:.1f} s"
        return f"{self.run}: {self.words or self.kind} at step {self.at_step}: {self.end}{after}"


def harmed(scene: Scene, kind: str, name: str) -> Draw:
    """Lets the run train, inflicts one injury and waits until training continues."""
    if (stood := let_train(scene.live, scene.training, scene.chance)) != "survived":
        return Draw(kind=kind, run=name, words=f"before {kind}", at_step=scene.training.newest(), end=stood)
    scene.words, at_step = [], scene.training.newest()
    try:
        event = scene.training.last_event()
        injuries(scene.run)[kind](scene)
    except (NotMet, TimeoutError) as error:
        return Draw(kind=kind, run=name, words=f"{kind}: {error}", at_step=at_step, end="not met")
    end, seconds = new_step(scene.live, scene.training, number=IN_THE_PIPE, since=time.time(), event=event)
    return Draw(kind=kind, run=name, words=", ".join(scene.words), at_step=at_step, end=end, seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class Books:
    """Holds the sample counts of a run's ledger at its end."""

    issued: int
    lost: int
    trained_twice: int
    without_reason: int


def read_ledger(folder: Path) -> Books:
    """Reads the ledger of a run that has trained all of its steps."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as database:

        def count(query: str) -> int:
            return int(database.execute(query).fetchone()[0])

        ended = "SELECT uid FROM events WHERE event IN ('trained', 'dropped')"
        return Books(
            issued=count("SELECT COUNT(DISTINCT uid) FROM events WHERE event = 'issued'"),
            lost=count(f"SELECT COUNT(DISTINCT uid) FROM events WHERE event = 'issued' AND uid NOT IN ({ended})"),
            trained_twice=count(
                "SELECT COUNT(*) FROM (SELECT uid FROM events WHERE event = 'trained' GROUP BY uid HAVING COUNT(*) > 1)"
            ),
            without_reason=count(
                "SELECT COUNT(*) FROM events WHERE event = 'dropped' AND (reason IS NULL OR reason = '')"
            ),
        )


def storm_run(folder: Path, name: str, kinds: Sequence[str], *, seed: int) -> Iterator[Draw | Books]:
    """Runs once with these injuries, then to its end without harm; yields each draw, then the ledger's counts."""
    run, training = RUNS[name], Training(folder)
    scene = Scene(
        folder=folder,
        run=run,
        chance=random.Random(seed),
        training=training,
        live=LiveRun(folder, *run.overrides, WITHOUT_END),
    )
    try:
        for kind in kinds:
            draw = harmed(scene, kind, name)
            yield draw
            if draw.end in ("hung", "ended"):
                print(scene.live.output()[-6000:], flush=True)
                scene.live.kill_everything()
                scene.again()
        scene.live.terminate()
        scene.live.finish()
    finally:
        scene.live.__exit__()
    steps = training.newest() + 1 + LAST_STEPS
    with LiveRun(folder, *run.overrides, f"run.steps={steps}", "resume=auto") as live:
        finished = live.finish()
    if finished.code:
        print(finished.output[-6000:], flush=True)
        yield Draw(kind="quiet end", run=name, words=f"exit code {finished.code}", at_step=steps, end="ended")
    yield read_ledger(folder)


class SmallDisk:
    """Mounts a small file system on a folder, for runs that fill their disk; does nothing if the user may not mount."""

    def __init__(self, folder: Path) -> None:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
        self.mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        self._folder = folder

    def close(self) -> None:
        """Unmounts the file system."""
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self._folder)], check=True)


def storm(
    folder: Path, draws: int, *, runs: Sequence[str], only: Sequence[str] | None, seed: int
) -> Iterator[Draw | Books]:
    """Makes ``draws`` draws under a seed; ``only`` limits the kinds of injury."""
    chance = random.Random(seed)
    left, number = draws, 0
    while left:
        name = chance.choice(list(runs))
        place = folder / f"storm{number}"
        place.mkdir()
        disk = SmallDisk(place)
        try:
            kinds = [
                kind
                for kind in injuries(RUNS[name])
                if (only is None or kind in only) and (disk.mounted or kind != "full disk")
            ]
            chosen = [chance.choice(kinds) for _ in range(min(left, DRAWS_A_RUN))]
            yield from storm_run(place / "run", name, chosen, seed=chance.randrange(1 << 30))
            left -= len(chosen)
        finally:
            disk.close()
        number += 1


def storm_table(found: Sequence[Draw | Books]) -> str:
    """Returns the table by kind of injury, and the sums of the ledgers."""
    draws = [one for one in found if isinstance(one, Draw)]
    books = [one for one in found if isinstance(one, Books)]
    ends = ("survived", "hung", "ended", "not met")
    lines = [
        f"| injury | draws | {' | '.join(ends)} | third new step, s: p50 | p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in (*sorted({draw.kind for draw in draws}), "all"):
        own = [draw for draw in draws if kind in (draw.kind, "all")]
        seconds = sorted(draw.seconds for draw in own if draw.seconds is not None)
        times = (
            (f"{seconds[len(seconds) // 2]:.1f}", f"{seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]:.1f}")
            if seconds
            else ("", "")
        )
        counts = [sum(draw.end == end for draw in own) for end in ends]
        lines.append(f"| {' | '.join(map(str, (kind, len(own), *counts, *times)))} |")
    lines.append(
        f"ledgers: {sum(one.issued for one in books):,} samples in {len(books)} runs; lost "
        f"{sum(one.lost for one in books)}, trained twice {sum(one.trained_twice for one in books)}, dropped without a "
        f"reason {sum(one.without_reason for one in books)}"
    )
    return "\n".join(lines)


def went_wrong(found: Sequence[Draw | Books]) -> bool:
    """Returns whether a run hung or ended, or a sample was lost, trained twice or dropped without a reason."""
    return any(
        one.end in ("hung", "ended")
        if isinstance(one, Draw)
        else bool(one.lost or one.trained_twice or one.without_reason)
        for one in found
    )
