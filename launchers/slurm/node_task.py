"""Defines the task that a Slurm job executes on each node.

The task supervises child processes and never imports Ray.

The first task executes the run. In a job of several nodes, the first task also starts the head of a Ray cluster for the
lifetime of the job, and each further task starts one Ray node. Tasks communicate by files in a folder of the attempt.
Each file is written atomically.

SIGUSR2 means that the time limit is near or that Slurm preempts the job: the run writes a checkpoint and the job is
queued again. After SIGUSR1 the run writes a checkpoint and ends. After SIGTERM (scancel) all processes end at once.
Slurm sends signals to every process of a job step, so the child processes ignore SIGUSR1 and SIGUSR2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from launchers.slurm.job_state import slurm_call
from launchers.slurm.task_identity import TaskIdentity, task_folder
from launchers.submitted import CONFIG_FILE, RunEnd, read_submitted, write_atomically, write_end
from relax_core.config.schema import RelaxConfig, SlurmLauncherConfig
from relax_core.contracts.child_process import Child, cause_in_log
from relax_core.contracts.private_folder import set_private_files
from relax_core.contracts.process_trees import become_subreaper, end_children
from relax_core.control.host.ray_session import (
    LOOPBACK_SWITCH,
    ONE_THREAD,
    QUIET,
    RAY_CPUS,
    new_token_file,
)
from relax_core.control.host.run_paths import SHARED_MEMORY, WEIGHTS_PREFIX

FAILED = 1
POLL_S = 0.2
HEAD_S = 60.0  # time limit until a Ray head listens
DONE_S = 20.0  # after a Ray node is lost, its task waits this time for the first task to end the run
REQUEUED_S = 60.0  # time limit until Slurm ends the processes of a requeued job
STOPPED = 128 + signal.SIGTERM
JOINED = {name: value for name, value in QUIET.items() if name != LOOPBACK_SWITCH}
JOINED["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
HEAD, DONE, LOST, RUN = "head", "done", "lost", "run"


@dataclass(frozen=True)
class SlurmTask:
    """Is the task that submitit calls on every node. ``run_dir`` is the run's folder."""

    run_dir: str

    def __call__(self) -> None:
        """Executes this node's task. Exits with the task's exit code if it is not 0."""
        code = run_task(Path(self.run_dir), TaskIdentity.of_environment())
        if code:
            sys.exit(code)  # sets Slurm's state of the job to FAILED


class Signals:
    """Records the signals of this task: requests to queue the job again, to stop the run, or to end at once."""

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
    """The task has received SIGTERM, so all its processes end at once."""


class NodeLost(Exception):
    """A Ray node of the job has exited. The error's text names the node."""


def run_task(run_dir: Path, identity: TaskIdentity) -> int:
    """Executes one task and returns its exit code. Ends all its processes and removes its temporary folder."""
    signals = Signals()
    set_private_files()
    config, _ = read_submitted((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    attempt = run_dir / "slurm" / identity.attempt
    attempt.mkdir(parents=True, exist_ok=True)
    become_subreaper()
    with ExitStack() as undo:
        folder = undo.enter_context(task_folder(identity.raw_job_id))
        undo.callback(end_children)
        task = _Task(run_dir, attempt, folder, config, identity, signals, undo)
        try:
            return task.lead() if identity.rank == 0 else task.follow()
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
        config: RelaxConfig,
        identity: TaskIdentity,
        signals: Signals,
        undo: ExitStack,
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._folder = folder
        assert isinstance(config.launcher, SlurmLauncherConfig)
        self._launcher, self._gpus = config.launcher, config.placement.gpus_per_node
        self._identity = identity
        self._signals = signals
        self._undo = undo
        self._token = attempt / "ray-token"

    # -- the first task -----------------------------------------------------------------------------------------------
    def lead(self) -> int:
        """Executes the run and records how it ended. In a job of several nodes, first starts the Ray head."""
        address, head = None, None
        try:
            if self._identity.nodes > 1:
                address, head = self._start_head()
            code = self._await_run(self._start_run(address), head)
        except NodeLost as lost:
            print(f"relax: failed: {lost}; resume=auto goes on from the newest checkpoint", file=sys.stderr, flush=True)
            return self._record_end(FAILED, str(lost))
        if code == STOPPED and self._signals.requeue:
            return self._requeue()
        return self._record_end(code, "")

    def _start_head(self) -> tuple[str, Child]:
        new_token_file(self._token)
        self._undo.callback(self._token.unlink, missing_ok=True)
        # The kernel chooses every port and the port is bound at once, so no other user of this node can take it first.
        head = self._start_ray("head", "--head", "--port=0", "--include-dashboard=false")
        named = self._folder / "ray" / "ray_current_cluster"  # Ray writes this file when the head listens
        self._await(lambda: named.exists() and bool(named.read_text()), head, "the Ray head", HEAD_S)
        address = named.read_text().strip()
        write_atomically(self._attempt / HEAD, f"{address} {self._folder}")
        return address, head

    def _start_run(self, address: str | None) -> Child:
        command = [sys.executable, "-u", "-P", "-m", "launchers.saved_run", str(self._run_dir / CONFIG_FILE)]
        if address is not None:
            command.append(f"--ray-address={address}")
        if self._identity.restarts:
            command.append("--again")
        run = self._child("the run", command, joined=address is not None)
        write_atomically(self._attempt / RUN, str(run.pid))
        self._undo.callback(remove_run_folders, run.pid, SHARED_MEMORY, self._run_dir)
        self._undo.callback(end_children)
        return run

    def _await_run(self, run: Child, head: Child | None) -> int:
        """Waits for the run and returns its exit code. Raises `NodeLost` if a Ray node exits meanwhile."""
        terminated = False
        while (code := run.poll()) is None:
            self._raise_if_ended()
            if self._signals.stop and not terminated:
                terminated = True
                run.send_signal(signal.SIGTERM)
            if head is not None and head.poll() is not None:
                log = self._attempt / "head.log"
                raise NodeLost(f"{self._identity.node}: its Ray head ended with {head.poll()}; see {log}")
            if lost := sorted(file.read_text() for file in self._attempt.glob(f"{LOST}-*")):
                raise NodeLost("; ".join(lost))
            time.sleep(POLL_S)
        return code

    def _requeue(self) -> int:
        limit = self._launcher.max_requeues
        if self._identity.restarts >= limit:
            return self._record_end(STOPPED, f"Slurm stopped it again (launcher.max_requeues={limit})")
        print("relax: stopped by Slurm with a checkpoint; the job is queued again", flush=True)
        (self._attempt / DONE).touch()
        self._undo.close()  # cleans up before Slurm ends the remaining processes
        done = slurm_call("scontrol", "requeue", self._identity.raw_job_id)
        if done.returncode:
            return self._record_end(STOPPED, f"stopped by Slurm, which does not queue it again: {done.stderr.strip()}")
        deadline = time.monotonic() + REQUEUED_S
        while not self._signals.end and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return STOPPED

    def _record_end(self, code: int, cause: str) -> int:
        (self._attempt / DONE).touch()
        write_end(self._run_dir, RunEnd(code=code, cause=cause, attempt=self._identity.attempt))
        return code

    # -- the other tasks ----------------------------------------------------------------------------------------------
    def follow(self) -> int:
        """Starts a Ray node and supervises it until the first task is done."""
        wait_s = HEAD_S + 60.0  # the first task may start later than this task
        self._await((self._attempt / HEAD).exists, None, "the Ray head's address", wait_s)
        address, folder = (self._attempt / HEAD).read_text().split()
        # A Ray node uses the same path as the head, on its local disk.
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        self._undo.callback(self._remove_media)
        self._undo.callback(end_children)
        rank = self._identity.rank
        node = self._start_ray(f"node-{rank}", f"--address={address}")
        while not (self._attempt / DONE).exists():
            self._raise_if_ended()
            if (code := node.poll()) is not None and not (self._attempt / DONE).exists():
                return self._report_node_lost(code)
            time.sleep(POLL_S)
        return 0

    def _remove_media(self) -> None:
        """Removes media items that a killed run left in this node's shared memory."""
        if (self._attempt / RUN).exists():
            remove_run_folders(int((self._attempt / RUN).read_text()), SHARED_MEMORY)

    def _report_node_lost(self, code: int) -> int:
        rank, node = self._identity.rank, self._identity.node
        log = self._attempt / f"node-{rank}.log"
        why = cause_in_log(log)
        report = f"{node}: its Ray node ended with {code}{why and f': {why}'}; see {log}"
        write_atomically(self._attempt / f"{LOST}-{rank}", report)
        deadline = time.monotonic() + DONE_S
        while not (self._attempt / DONE).exists() and time.monotonic() < deadline:
            self._raise_if_ended()
            time.sleep(POLL_S)
        return FAILED

    # -- every task ---------------------------------------------------------------------------------------------------
    def _start_ray(self, name: str, *arguments: str) -> Child:
        """Starts `ray start --block`. Its log is in the attempt's folder."""
        command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={self._identity.address}", f"--num-cpus={RAY_CPUS}"]
        command += [f"--num-gpus={self._gpus}", f"--object-store-memory={self._launcher.object_store_mb << 20}"]
        command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0", *arguments]
        if arguments[0] == "--head":
            command.append(f"--temp-dir={self._folder / 'ray'}")
        return self._child(f"Ray's {name}", command, joined=True, log=self._attempt / f"{name}.log")

    def _child(self, name: str, command: list[str], *, joined: bool, log: Path | None = None) -> Child:
        """Starts a child process. It stops when this process ends, and ignores Slurm's signals to the whole job."""
        return Child(
            command,
            name=name,
            log=log,
            stdin=subprocess.DEVNULL,
            stdout=None,
            environment=self._environment(joined=joined),
            with_parent=signal.SIGTERM,
            ignored=(signal.SIGUSR1, signal.SIGUSR2),
        )

    def _environment(self, *, joined: bool) -> dict[str, str]:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("SUBMITIT_")}
        variables |= {"TMPDIR": str(self._folder), **ONE_THREAD}
        if joined:
            variables |= {**JOINED, "RAY_AUTH_TOKEN_PATH": str(self._token)}
        return variables

    def _raise_if_ended(self) -> None:
        if self._signals.end:
            raise Ended

    def _await(self, exists: Callable[[], bool], child: Child | None, name: str, limit_s: float) -> None:
        node = self._identity.node
        deadline = time.monotonic() + limit_s
        while not exists():
            self._raise_if_ended()
            if child is not None and child.poll() is not None:
                raise NodeLost(f"{node}: {name} ended with {child.poll()}; see {self._attempt}")
            if time.monotonic() > deadline:
                raise NodeLost(f"{node}: {name} did not appear within {limit_s:.0f} s; see {self._attempt}")
            time.sleep(POLL_S)


def remove_run_folders(pid: int, *parents: Path) -> None:
    """Removes published weights and media items that a killed run left in folders outside of TMPDIR.

    ``pid`` is the process id of the run's supervisor.
    """
    for parent in parents:
        for folder in parent.glob(f"{WEIGHTS_PREFIX}{pid}-*"):
            shutil.rmtree(folder, ignore_errors=True)
