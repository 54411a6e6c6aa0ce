"""What runs on each node of a Slurm job: a supervisor that never imports Ray.

The first task runs the run; with more than one node it is the head of a Ray cluster that lives as long as the job, and
the other tasks hold a Ray node each. Tasks meet in a folder of the attempt, by files that are whole or not there.

SIGUSR2 (the limit is near, or another job wants the nodes): checkpoint, and queue the job again. SIGUSR1: checkpoint,
and end. SIGTERM (scancel): end at once. Slurm signals every process of a step, so children ignore the first two.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from launchers.processes import Child, remove_place
from launchers.slurm_place import TaskIdentity, task_folder
from launchers.slurm_state import slurm_call
from launchers.submitted import CONFIG_FILE, RunEnd, put, read_submitted, write_end
from relax_core.config.schema import SlurmLauncherConfig
from relax_core.control.host.ray_session import LOOPBACK_SWITCH, ONE_THREAD, QUIET, new_token_file
from relax_core.control.host.subreaper import become_subreaper, end_children

FAILED = 1
LOOK_S = 0.2
HEAD_S = 60.0  # a Ray head listens within this
DONE_S = 20.0  # a task that lost its Ray node gives the first one so long to end the run in order
REQUEUED_S = 60.0  # Slurm ends a job's processes within this once it has queued it again
STOPPED = 128 + signal.SIGTERM
JOINED = {name: value for name, value in QUIET.items() if name != LOOPBACK_SWITCH}
JOINED["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
HEAD, DONE, LOST = "head", "done", "lost"


@dataclass(frozen=True)
class SlurmTask:
    """What submitit calls on every node. ``run_dir``: the run's folder."""

    run_dir: str

    def __call__(self) -> None:
        code = run_task(Path(self.run_dir), TaskIdentity.of_environment())
        if code:
            sys.exit(code)  # so that Slurm, too, says FAILED


class Orders:
    """The signals that this task was sent."""

    def __init__(self) -> None:
        self.requeue = self.stop = self.end = False
        signal.signal(signal.SIGUSR2, self._take)
        signal.signal(signal.SIGUSR1, self._take)
        signal.signal(signal.SIGTERM, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.requeue |= number == signal.SIGUSR2
        self.stop |= number in (signal.SIGUSR1, signal.SIGUSR2)
        self.end |= number == signal.SIGTERM


class Ended(Exception):
    """SIGTERM came: everything ends at once."""


class NodeLost(Exception):
    """A Ray node of the job is gone; the text names it."""


def run_task(run_dir: Path, place: TaskIdentity) -> int:
    """The life of one task. Returns its exit code; nothing of it is left afterwards."""
    orders = Orders()
    config, _ = read_submitted((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    launcher = config.launcher
    assert isinstance(launcher, SlurmLauncherConfig)
    attempt = run_dir / "slurm" / place.attempt
    attempt.mkdir(parents=True, exist_ok=True)
    become_subreaper()
    with ExitStack() as undo:
        folder = undo.enter_context(task_folder(place.raw_job_id))
        undo.callback(end_children)
        task = _Task(run_dir, attempt, folder, launcher, place, orders, undo)
        try:
            return task.lead() if place.rank == 0 else task.follow()
        except Ended:
            return STOPPED
        except NodeLost as lost:
            print(f"relax: {lost}", file=sys.stderr, flush=True)
            return FAILED


class _Task:
    def __init__(
        self,
        run_dir: Path,
        attempt: Path,
        folder: Path,
        launcher: SlurmLauncherConfig,
        place: TaskIdentity,
        orders: Orders,
        undo: ExitStack,
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._folder = folder
        self._launcher = launcher
        self._place = place
        self._orders = orders
        self._undo = undo
        self._token = attempt / "ray-token"

    # -- the first task -----------------------------------------------------------------------------------------------
    def lead(self) -> int:
        """Runs the run and says how it ended. With several nodes it is the head of their Ray."""
        address, head = None, None
        try:
            if self._place.nodes > 1:
                address, head = self._start_head()
            code = self._await_run(self._start_run(address), head)
        except NodeLost as lost:
            print(f"relax: failed: {lost}; resume=auto goes on from the newest checkpoint", file=sys.stderr, flush=True)
            return self._say_end(FAILED, str(lost))
        if code == STOPPED and self._orders.requeue:
            return self._requeue()
        return self._say_end(code, "")

    def _start_head(self) -> tuple[str, Child]:
        new_token_file(self._token)
        self._undo.callback(self._token.unlink, missing_ok=True)
        port = _free_port(self._place.address)
        head = self._start_ray("head", "--head", f"--port={port}", "--include-dashboard=false")
        self._await(lambda: _listens(self._place.address, port), head, "the Ray head", HEAD_S)
        address = f"{self._place.address}:{port}"
        put(self._attempt / HEAD, f"{address} {self._folder}")
        return address, head

    def _start_run(self, address: str | None) -> Child:
        command = [sys.executable, "-u", "-m", "launchers.saved_run", str(self._run_dir / CONFIG_FILE)]
        if address is not None:
            command.append(f"--ray-address={address}")
        if self._place.restarts:
            command.append("--again")
        run = Child(command, environment=self._environment(joined=address is not None))
        self._undo.callback(remove_place, run.pid, self._run_dir)
        self._undo.callback(end_children)
        return run

    def _await_run(self, run: Child, head: Child | None) -> int:
        """The run's exit code. Raises `NodeLost`."""
        told = False
        while (code := run.poll()) is None:
            self._look()
            if self._orders.stop and not told:
                told = True
                run.terminate()
            if head is not None and head.poll() is not None:
                log = self._attempt / "head.log"
                raise NodeLost(f"{self._place.node}: its Ray head ended with {head.poll()}; see {log}")
            if lost := sorted(file.read_text() for file in self._attempt.glob(f"{LOST}-*")):
                raise NodeLost("; ".join(lost))
            time.sleep(LOOK_S)
        return code

    def _requeue(self) -> int:
        limit = self._launcher.max_requeues
        if self._place.restarts >= limit:
            return self._say_end(STOPPED, f"Slurm stopped it again (launcher.max_requeues={limit})")
        print("relax: stopped by Slurm with a checkpoint; the job is queued again", flush=True)
        (self._attempt / DONE).touch()
        self._undo.close()  # before Slurm ends what is left
        done = slurm_call("scontrol", "requeue", self._place.raw_job_id)
        if done.returncode:
            return self._say_end(STOPPED, f"stopped by Slurm, which does not queue it again: {done.stderr.strip()}")
        deadline = time.monotonic() + REQUEUED_S
        while not self._orders.end and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return STOPPED

    def _say_end(self, code: int, cause: str) -> int:
        (self._attempt / DONE).touch()
        write_end(self._run_dir, RunEnd(code=code, cause=cause, attempt=self._place.attempt))
        return code

    # -- the other tasks ----------------------------------------------------------------------------------------------
    def follow(self) -> int:
        """Holds a Ray node until the first task is done."""
        wait_s = HEAD_S + 60.0  # the first task may have been started later
        self._await((self._attempt / HEAD).exists, None, "the Ray head's address", wait_s)
        address, folder = (self._attempt / HEAD).read_text().split()
        # A Ray node takes the head's folder, on its own machine.
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        self._undo.callback(end_children)
        node = self._start_ray(f"node-{self._place.rank}", f"--address={address}")
        while not (self._attempt / DONE).exists():
            self._look()
            if (code := node.poll()) is not None and not (self._attempt / DONE).exists():
                return self._tell_lost(code)
            time.sleep(LOOK_S)
        return 0

    def _tell_lost(self, code: int) -> int:
        what = f"{self._place.node}: its Ray node ended with {code}; see {self._attempt}/node-{self._place.rank}.log"
        put(self._attempt / f"{LOST}-{self._place.rank}", what)
        deadline = time.monotonic() + DONE_S
        while not (self._attempt / DONE).exists() and time.monotonic() < deadline:
            self._look()
            time.sleep(LOOK_S)
        return FAILED

    # -- both ---------------------------------------------------------------------------------------------------------
    def _start_ray(self, name: str, *words: str) -> Child:
        """`ray start`, which stays; its log is in the attempt's folder."""
        launcher = self._launcher
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={self._place.address}", f"--num-cpus={launcher.ray_logical_cpus}"]
        command += [f"--num-gpus={launcher.gpus_per_node}", f"--object-store-memory={launcher.object_store_mb << 20}"]
        command += ["--min-worker-port=0", "--max-worker-port=0", *words]
        if words[0] == "--head":
            command.append(f"--temp-dir={self._folder / 'ray'}")
        return Child(command, environment=self._environment(joined=True), log=self._attempt / f"{name}.log")

    def _environment(self, *, joined: bool) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("SUBMITIT_")}
        ours |= {"TMPDIR": str(self._folder), **ONE_THREAD}
        if joined:
            ours |= {**JOINED, "RAY_AUTH_TOKEN_PATH": str(self._token)}
        return ours

    def _look(self) -> None:
        if self._orders.end:
            raise Ended

    def _await(self, there: Callable[[], bool], child: Child | None, what: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not there():
            self._look()
            if child is not None and child.poll() is not None:
                raise NodeLost(f"{self._place.node}: {what} ended with {child.poll()}; see {self._attempt}")
            if time.monotonic() > deadline:
                raise NodeLost(f"{self._place.node}: {what} was not there within {limit_s:.0f} s; see {self._attempt}")
            time.sleep(LOOK_S)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1.0):
            return True
    except OSError:
        return False
