"""Executes `python -m relax_core` in a separate session. Tests observe and harm the run. No remains are allowed."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from relax_core.control.controller_process import CONTROLLER

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 600.0
GONE_S = 60.0  # processes may end slowly on a loaded machine
POLL_S = 0.02
NOBODY = 65534  # user id
MARK = "RELAX_TEST_RUN"  # environment variable of every process of the run

NOTICED = re.compile("^tier [12] at step .*; (started again in place|all services start again from step)", re.MULTILINE)
TIER = re.compile("^tier ([12]) at step ", re.MULTILINE)  # line of a recovery in the output
MEDIA_LIBRARY = re.compile(r"\S*/site-packages/(PIL|av)/\S+")  # both libraries have compiled modules
TOLD_STEP = re.compile("^step [1-9]", re.MULTILINE)
STOPPING = "stopping: a checkpoint is written"
RECOVERED = "; training went on from step "

ENGINE = "relax_core.engines.embedded"
ROLLOUT = "ray::RolloutWorker"


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """Holds the results of a run: exit code, output, folder and summary."""

    code: int
    output: str
    folder: Path
    summary: dict[str, Any]

    def steps(self) -> list[dict[str, float]]:
        """Returns the trainer's metrics of each step, in order. Steps repeated after a resume have the last values."""
        return [values for _, values in sorted(_actor_steps(self.folder).items())]

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "hf" / "model.safetensors")

    def persisted(self, event: str) -> Counter[str]:
        """Returns the number of these events ("issued", "trained", "dropped") in the ledger's file by uid."""
        with closing(sqlite3.connect(self.folder / "ledger.sqlite")) as database:
            return Counter(uid for (uid,) in database.execute("SELECT uid FROM events WHERE event = ?", (event,)))

    def assert_all_samples_accounted(self) -> None:
        """Checks that every issued sample was trained once or dropped with a reason, in the counts and for each uid."""
        books = self.summary["ledger"]
        assert books["lost"] == books["trained_twice"] == books["open"] == 0, books
        assert books["issued"] == books["trained"] + sum(books["dropped"].values()), books
        trained, dropped = self.persisted("trained"), self.persisted("dropped")
        assert set((trained + dropped).values()) == {1}
        assert set(trained + dropped) == set(self.persisted("issued"))
        assert len(trained) == books["trained"]

    def checkpoints(self) -> list[int]:
        """Returns the steps of complete checkpoints."""
        return sorted(
            int(file.parent.name.removeprefix("step_")) for file in self.folder.glob("checkpoints/step_*/meta.json")
        )


class LiveRun:
    """Runs one command. As a context manager, ends all processes of the run."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        cwd: Path = ROOT,
        environment: Mapping[str, str] | None = None,
        user: int | None = None,
    ) -> None:
        """Starts the run from the folder ``cwd`` with more environment variables.

        ``user`` is a numeric user id, for tests that run as root (`as_user`).
        """
        self.folder = folder
        self._mark = secrets.token_hex(8)
        # A short path, because it contains sockets. It contains all temporary files of the run.
        self.temporary = Path(tempfile.mkdtemp(prefix="rt"))
        self._log = self.temporary.with_suffix(".log")
        prefix: list[str] = []
        own = {"TMPDIR": str(self.temporary), MARK: self._mark}
        if user is not None:
            os.chown(self.temporary, user, user)
            own |= {"HOME": str(self.temporary), "USER": str(user)}
            prefix = as_user(user)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "relax_core", f"run.dir={folder}", "run.panel=false", *overrides],
                cwd=cwd,
                env={**os.environ, **own, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends processes and removes files of a failed test. A run that ended normally has no remains."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in self._shared_memory():
            shutil.rmtree(folder)
        shutil.rmtree(self.temporary, ignore_errors=True)
        self._log.unlink()

    @property
    def pid(self) -> int:
        """Returns the pid of the supervisor, which is the started process."""
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    # -- observing ----------------------------------------------------------------------------------------------------
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """Returns pid → command line of the run's living processes: same session, or the mark in the environment."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and self._is_ours(int(entry.name)):
                with suppress(OSError):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def _is_ours(self, pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            marked = f"{MARK}={self._mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            return state != "Z" and (marked or os.getsid(pid) == self._process.pid)
        except OSError:  # the process has ended, or belongs to another user
            return False

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Waits for a condition. Fails with the run's output if the run ends first."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self._process.poll() is None, f"the run ended before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S:.0f} s:\n{self.output()}"
            time.sleep(POLL_S)

    def wait_step(self, step: int) -> None:
        """Waits until the trainer has reported train step ``step`` and the controller has printed a step. Before the
        first printed step, a stop writes no checkpoint.
        """
        self.wait_for(f"step {step}", lambda: max(_actor_steps(self.folder), default=-1) >= step)
        self.wait_for("a line about a step", lambda: TOLD_STEP.search(self.output()) is not None)

    def assert_no_media_library(self) -> None:
        """Checks that no process of the run has loaded Pillow or PyAV, and that no folder of media items exists."""
        looked_at = 0
        for pid, line in self.processes().items():
            with suppress(FileNotFoundError, ProcessLookupError):
                loaded = MEDIA_LIBRARY.search(Path(f"/proc/{pid}/maps").read_text())
                assert loaded is None, f"{line}: {loaded}"
                looked_at += 1
        assert looked_at >= 5  # supervisor, controller, bus, engine, trainer, rollout
        roots = self.places()
        assert roots and not [path for root in roots for path in root.rglob("media")]

    def wait_checkpoint(self, step: int) -> None:
        """Waits until the checkpoint of ``step`` is complete."""
        file = self.folder / "checkpoints" / f"step_{step:08d}" / "meta.json"
        self.wait_for(f"checkpoint {step}", file.exists)

    def wait_drawn(self, samples: int) -> None:
        """Waits until the rollout has reported ``samples`` samples."""
        self.wait_for(f"{samples} samples", lambda: sum(_drawn(self.folder)) >= samples)

    def wait_stop_received(self) -> None:
        """Waits until the run has printed that the trainer stops after its step."""
        self.wait_for("the stop to be heard", lambda: STOPPING in self.output())

    def wait_noticed(self, count: int) -> None:
        """Waits until the run has reported ``count`` losses of a process or of all services."""
        self.wait_for(f"loss {count} to be noticed", lambda: len(NOTICED.findall(self.output())) >= count)

    def wait_recovered(self, count: int) -> None:
        """Waits until the run has reported ``count`` recoveries."""
        self.wait_for(f"recovery {count}", lambda: self.output().count(RECOVERED) >= count)

    # -- harm ---------------------------------------------------------------------------------------------------------
    def kill(self, command: str) -> int:
        """Sends SIGKILL to the only process with ``command`` in its command line. Returns the pid."""
        return self._signal(command, signal.SIGKILL)

    def freeze(self, command: str) -> int:
        """Sends SIGSTOP to the only process with ``command`` in its command line. Returns the pid."""
        return self._signal(command, signal.SIGSTOP)

    def thaw(self, pid: int) -> None:
        """Continues a frozen process."""
        os.kill(pid, signal.SIGCONT)

    def _signal(self, command: str, number: int) -> int:
        pid = self._the_process(command, lambda pid, line: command in line)
        os.kill(pid, number)
        return pid

    def kill_controller(self) -> None:
        """Sends SIGKILL to the controller, but not to the supervisor with the same command line."""
        os.kill(self._the_process(CONTROLLER, lambda pid, _: _short_name(pid) == CONTROLLER), signal.SIGKILL)

    def _the_process(self, what: str, is_meant: Callable[[int, str], bool]) -> int:
        """Waits for exactly one matching process, because a new fork has its parent's name for a moment."""
        found: list[int] = []

        def one_is_there() -> bool:
            found[:] = [pid for pid, line in self.processes().items() if is_meant(pid, line)]
            return len(found) == 1

        self.wait_for(f"one process {what}", one_is_there)
        return found[0]

    def kill_owners(self) -> None:
        """Sends SIGKILL to the controller and its supervisor at the same time. So no process cleans up."""
        os.kill(self._process.pid, signal.SIGSTOP)
        self.kill_controller()
        self._process.kill()
        self._process.wait(GONE_S)

    def kill_everything(self) -> None:
        """Sends SIGKILL to all processes of the run, like a crash of the machine, and waits for their end."""
        deadline = time.monotonic() + GONE_S
        while processes := self.processes():
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            assert time.monotonic() < deadline, f"not gone after {GONE_S:.0f} s: {processes}"

    def interrupt(self) -> None:
        """Sends SIGINT to all processes of the foreground group, like Ctrl-C in a terminal."""
        os.killpg(self._process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Sends SIGTERM to the supervisor, like a scheduler."""
        self._process.terminate()

    def signal_all(self, number: int) -> None:
        """Sends the signal to all processes of the run, like a service manager."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    # -- the end ------------------------------------------------------------------------------------------------------
    def finish(self, *, deadline_s: float = DEADLINE_S) -> FinishedRun:
        """Waits for the end and asserts that no process, shared memory or temporary folder is left."""
        try:
            code = self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run goes on after {deadline_s:.0f} s:\n{self.output()}") from None
        deadline = time.monotonic() + GONE_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        assert not self.processes(), f"left behind: {self.processes()}\n{self.output()}"
        assert not self.places(), f"left behind: {self.places()}\n{self.output()}"
        summary_file = self.folder / "summary.json"
        summary = json.loads(summary_file.read_text()) if summary_file.exists() else {}
        return FinishedRun(code=code, output=self.output(), folder=self.folder, summary=summary)

    def places(self) -> list[Path]:
        """Returns the run's folders under /tmp and in shared memory, except torch's cache, which may stay."""
        return [*self.temporary.glob("rlx-*"), *self._shared_memory()]

    def _shared_memory(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"relax-{self._process.pid}-*"))


def as_user(user: int) -> list[str]:
    """Returns the prefix of a command that root starts as another user.

    This user may read every file, because Python and its packages may be below /root. The user may write only files of
    its own.
    """
    capability = "+dac_read_search"
    ids = (f"--reuid={user}", f"--regid={user}", "--clear-groups")
    return ["setpriv", *ids, f"--inh-caps={capability}", f"--ambient-caps={capability}"]


def run_to_end(folder: Path, *overrides: str, deadline_s: float = DEADLINE_S, cwd: Path = ROOT) -> FinishedRun:
    """Runs `python -m relax_core` with these overrides from the folder ``cwd`` to its end."""
    with LiveRun(folder, *overrides, cwd=cwd) as live:
        return live.finish(deadline_s=deadline_s)


def _actor_steps(folder: Path) -> Mapping[int, dict[str, float]]:
    """Returns the trainer's metrics by step."""
    return {record["step"]: record["values"] for record in _records(folder) if record["source"] == "actor"}


def _drawn(folder: Path) -> list[float]:
    """Returns the number of samples of each record of the rollout."""
    return [record["values"]["samples"] for record in _records(folder) if record["source"] == "rollout"]


def _records(folder: Path) -> list[dict[str, Any]]:
    """Returns the records in all complete lines of metrics.jsonl."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _short_name(pid: int) -> str:
    """Returns the name as in `ps`, or "" if the process has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
