"""Defines the faults ("injuries") of `benchmarks.chaos`: `injuries` returns the functions that inflict them, by name.

Some injuries kill or stop one process or two: at any moment, during its start, a checkpoint, a weight publication or
the final evaluation. The other injuries are a full disk, full shared memory, a locked ledger, no free file descriptor,
a memory limit, jumps of the clock, a damaged checkpoint and signals to all processes. After an injury that ends the
run, such as SIGKILL to all processes, the benchmark starts the command again with ``resume=auto``.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos_runs import (
    CONTROLLER,
    FORKED_WORKER,
    HUNG_S,
    OFFSET,
    POLL_S,
    RAY,
    WITHOUT_END,
    HarmedRun,
    Training,
    find_process,
    members,
    newborn,
)
from relax_core.contracts.process_trees import EXITED, kill, process_state
from tests.integration.live_run import LiveRun
from tests.outages import filled, locked

MOMENTS_S = (0.0, 0.1, 0.3, 1.0, 2.0)  # after a process appears; it usually responds within 2 s
OUTAGES_S = (2.0, 8.0, 15.0)
CLOCK_JUMPS_S = (-86_400, -600, -5, 5, 600, 86_400)
PHASE_S = 60.0  # timeout of the wait for a phase, such as a checkpoint
LAST_PHASE_S = 2.0  # duration of the final checkpoint, evaluation and export after the last train step
OUT_OF_MEMORY_S = 15.0
MEMORY_BYTES = 1 << 20  # memory that a process may allocate in addition to its present memory
SHARED_MEMORY, MEMORY_GROUPS = Path("/dev/shm"), Path("/sys/fs/cgroup/memory")
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
FULL_DISK, FULL_SHARED_MEMORY, OUT_OF_MEMORY = "full disk", "full shared memory", "out of memory"


class NotMet(Exception):
    """Raised if an injury could not be inflicted, because its precondition was not met in time."""


class Failed(Exception):
    """Raised if the run did not survive the injury. The text is the reason."""


@dataclass(kw_only=True)
class Scene:
    """Holds one run that is injured. ``live`` is the run's newest command. ``text`` describes the newest injury.

    ``stopped`` maps the processes that the newest injury stopped to the monotonic time of the signal.
    """

    folder: Path
    run: HarmedRun
    chance: random.Random
    training: Training
    live: LiveRun
    text: list[str] = field(default_factory=list)
    stopped: dict[int, float] = field(default_factory=dict)

    def process(self) -> tuple[str, int]:
        """Returns a random process kind and the newest living process of this kind."""
        kind = self.chance.choice(self.run.processes)
        return kind, find_process(self.live, kind)

    def send(self, kind: str, pid: int, number: signal.Signals) -> None:
        """Sends a signal to a process. A process that has ended is not an error."""
        self.text.append(f"{number.name} to {kind}")
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        if number == STOPPED:
            self.stopped[pid] = time.monotonic()

    def number(self) -> signal.Signals:
        """Returns SIGKILL or SIGSTOP."""
        return self.chance.choice((KILLED, STOPPED))

    def again(self) -> None:
        """Waits for the end of the command, ends its remaining processes and starts the command again."""
        with suppress(AssertionError):
            self.live.finish(deadline_s=HUNG_S)
        self.live.__exit__()
        self.live = self.run.start(self.folder, WITHOUT_END, "resume=auto")


def _wait(what: str, found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PHASE_S
    while not found():
        if time.monotonic() > deadline:
            raise NotMet(f"{what} did not come within {PHASE_S:g} s")
        time.sleep(POLL_S)


Inflict = Callable[[Scene], None]


# -- Signals to processes ---------------------------------------------------------------------------------------------
def signalled(kind: str, number: signal.Signals) -> Inflict:
    """Sends a signal to the newest process of a kind. If the controller is lost, waits for the next controller."""

    def inflict(scene: Scene) -> None:
        controllers = members(scene.live, CONTROLLER)
        scene.send(kind, find_process(scene.live, kind), number)
        if kind in (CONTROLLER, *RAY):
            newborn(scene.live, CONTROLLER, known=controllers)

    return inflict


def at_birth(kind: str, number: signal.Signals) -> Inflict:
    """Kills a process and sends a signal to its successor, at one of `MOMENTS_S` after the successor appeared."""

    def inflict(scene: Scene) -> None:
        known = members(scene.live, kind)
        kill(find_process(scene.live, "rollout" if kind == FORKED_WORKER else kind))
        if (pid := newborn(scene.live, kind, known=known)) is None:
            raise NotMet(f"no successor of {kind}")
        _harm_newborn(scene, kind, pid, number)

    return inflict


def at_the_start(scene: Scene) -> None:
    """Ends the run cleanly, starts it again, and kills or stops a process at one of `MOMENTS_S` after it appeared."""
    scene.live.terminate()
    scene.again()
    kind = scene.chance.choice(scene.run.processes)
    if (pid := newborn(scene.live, kind, known=set())) is None:
        raise NotMet(f"no {kind} at the start")
    _harm_newborn(scene, f"starting {kind}", pid, scene.number())


def _harm_newborn(scene: Scene, kind: str, pid: int, number: signal.Signals) -> None:
    moment_s = scene.chance.choice(MOMENTS_S)
    time.sleep(moment_s)
    scene.send(f"{kind} {moment_s:g} s after its birth", pid, number)


def pair(scene: Scene) -> None:
    """Kills or stops two processes within a second."""
    for kind, pid in [scene.process() for _ in range(2)]:
        scene.send(kind, pid, scene.number())
        time.sleep(scene.chance.uniform(0.0, 1.0))


def engine_and_owner(scene: Scene) -> None:
    """Stops an engine process, and stops or kills the engine owner."""
    scene.send("engine", find_process(scene.live, "engine"), STOPPED)
    scene.send("engine_owner", find_process(scene.live, "engine_owner"), scene.number())


def in_checkpoint(scene: Scene) -> None:
    """Kills or stops a process while a checkpoint is written."""
    kind, pid = scene.process()
    _wait("a checkpoint", lambda: any((scene.folder / "checkpoints").glob(".step_*.partial")))
    scene.send(f"{kind} in a checkpoint", pid, scene.number())


def in_publication(scene: Scene) -> None:
    """Kills or stops a process when a weight version appears."""
    kind, pid = scene.process()
    folders = [folder for folder in scene.live.places() if folder.parent == SHARED_MEMORY]
    before = {file for folder in folders for file in folder.rglob("*")}
    _wait("a weight version", lambda: bool({file for folder in folders for file in folder.rglob("*")} - before))
    scene.send(f"{kind} at a publication", pid, scene.number())


def at_the_end(scene: Scene) -> None:
    """Lets the run end normally, with final evaluation and export. Injures a process after the last train step."""
    scene.live.terminate()
    scene.live.finish(deadline_s=HUNG_S)
    scene.live.__exit__()
    steps = scene.training.newest() + 1 + scene.chance.randint(1, 3)
    last = ("resume=auto", f"run.steps={steps}", "run.export_hf=true", "eval.every=1000000")
    scene.live = scene.run.start(scene.folder, *last)
    _wait("the last train step", lambda: scene.training.newest() >= steps - 1 or not scene.live.running())
    time.sleep(scene.chance.uniform(0.0, LAST_PHASE_S))
    living = {kind: found for kind in scene.run.processes if (found := members(scene.live, kind))}
    if not living:
        raise NotMet("no process is left after the last train step")
    kind = scene.chance.choice(sorted(living))
    scene.send(f"{kind} after the last train step", max(living[kind]), scene.number())
    finished = scene.live.finish(deadline_s=HUNG_S)
    if finished.code != 0 or not (scene.folder / "hf" / "model.safetensors").exists():
        raise Failed(f"exit code {finished.code}\n{finished.output[-4000:]}")
    scene.stopped.clear()  # `finish` has checked that no process is left
    scene.again()


# -- Signals to all processes -----------------------------------------------------------------------------------------
def owners_killed(scene: Scene) -> None:
    """Kills supervisor and controller at the same time and starts the command again."""
    scene.text.append("SIGKILL to supervisor and controller")
    scene.live.kill_owners()
    scene.again()


def everything_killed(scene: Scene) -> None:
    """Kills all processes and starts the command again."""
    scene.text.append("SIGKILL to all processes")
    scene.live.kill_everything()
    scene.again()


def interrupted(number: signal.Signals) -> Inflict:
    """Sends a stop signal to all processes, so the run ends cleanly. Then starts the command again."""

    def inflict(scene: Scene) -> None:
        scene.text.append(f"{number.name} to all processes")
        scene.live.signal_all(number)
        scene.again()

    return inflict


# -- The machine ------------------------------------------------------------------------------------------------------
def full(disk: Path | None, name: str) -> Inflict:
    """Fills a file system for some seconds. None means the disk of the run's folder."""

    def inflict(scene: Scene) -> None:
        seconds = scene.chance.choice(OUTAGES_S)
        scene.text.append(f"{name} for {seconds:g} s")
        with filled(scene.folder.parent if disk is None else disk):
            time.sleep(seconds)

    return inflict


def ledger_locked(scene: Scene) -> None:
    """Locks the ledger for some seconds, as a backup does."""
    seconds = scene.chance.choice(OUTAGES_S)
    scene.text.append(f"ledger locked for {seconds:g} s")
    with locked(scene.folder / "ledger.sqlite"):
        time.sleep(seconds)


def no_descriptor(scene: Scene) -> None:
    """Prevents a process from opening files for some seconds."""
    kind, pid = scene.process()
    seconds = scene.chance.choice(OUTAGES_S)
    scene.text.append(f"no descriptor for {kind} for {seconds:g} s")
    with suppress(ProcessLookupError, FileNotFoundError):
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), before[1]))
        time.sleep(seconds)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def out_of_memory(scene: Scene) -> None:
    """Moves a process into a control group with little memory for some seconds, or until the kernel kills it."""
    kind, pid = scene.process()
    scene.text.append(f"{kind} reaches a memory limit")
    group = MEMORY_GROUPS / f"relax-chaos-{os.getpid()}-{pid}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
        with suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))
        deadline = time.monotonic() + OUT_OF_MEMORY_S
        while not process_state(pid).startswith(EXITED) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for survivor in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (MEMORY_GROUPS / "cgroup.procs").write_text(survivor)
    finally:
        _wait("the control group's end", lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def clock_jump(scene: Scene) -> None:
    """Moves the run's wall clock. The monotonic clock is unchanged."""
    seconds = scene.chance.choice(CLOCK_JUMPS_S)
    scene.text.append(f"clock at {seconds:+d} s")
    scene.folder.with_name(OFFSET).write_text(f"{seconds:+d}")


def damaged_checkpoint(scene: Scene) -> None:
    """Changes bytes of a random file of the newest checkpoint and kills the trainer."""
    checkpoints = scene.folder / "checkpoints"
    _wait("a second checkpoint", lambda: len(list(checkpoints.glob("step_*/meta.json"))) > 1)
    newest = max(checkpoints.glob("step_*/meta.json")).parent
    file = scene.chance.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    data = bytearray(file.read_bytes())
    place = scene.chance.randrange(max(1, len(data)))
    data[place : place + 8] = b"damaged!"
    file.write_bytes(data)
    scene.text.append(f"damaged {file.relative_to(scene.folder)}")
    scene.send("actor_rank_0", find_process(scene.live, "actor_rank_0"), KILLED)


def injuries(run: HarmedRun, *, without: Collection[str] = ()) -> dict[str, Inflict]:
    """Returns the injuries of a run kind except ``without``: name → function that inflicts the injury."""
    found: dict[str, Inflict] = {}
    for kind in (*run.processes, FORKED_WORKER):
        for verb, number in (("kill", KILLED), ("stop", STOPPED)):
            if kind != FORKED_WORKER:
                found[f"{verb} {kind}"] = signalled(kind, number)
            found[f"{verb} {kind} at birth"] = at_birth(kind, number)
    found |= {
        "a process at the start": at_the_start,
        "pair": pair,
        "engine and owner": engine_and_owner,
        "in a checkpoint": in_checkpoint,
        "at a publication": in_publication,
        "after the last train step": at_the_end,
        FULL_DISK: full(None, FULL_DISK),
        FULL_SHARED_MEMORY: full(SHARED_MEMORY, FULL_SHARED_MEMORY),
        OUT_OF_MEMORY: out_of_memory,
        "ledger locked": ledger_locked,
        "no descriptor": no_descriptor,
        "damaged checkpoint": damaged_checkpoint,
        "supervisor and controller killed": owners_killed,
        "everything killed": everything_killed,
        "SIGINT to all": interrupted(signal.SIGINT),
        "SIGTERM to all": interrupted(signal.SIGTERM),
    }
    if run.false_clock:
        found["clock jump"] = clock_jump
    return {name: inflict for name, inflict in found.items() if name not in without}
