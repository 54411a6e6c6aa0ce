"""Tests that a run locks its folders, and that only stale runs of the same user are removed."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from relax_core.contracts.process_trees import EXITED, process_state
from relax_core.control.host import run_paths as paths
from relax_core.control.host.run_paths import OWNER_FILE, claimed, owned, run_lock, run_paths

ROOT = Path(__file__).resolve().parents[3]
END_S = 60.0

# A supervisor, its controller, and a process that the controller started. Supervisor and controller exit when stdin
# ends.
RUN = """
import os, subprocess, sys
from pathlib import Path
from relax_core.control.host import run_paths as paths
paths.SHARED_MEMORY = Path(sys.argv[1])
with paths.run_paths(run_dir=Path("/runs/one")) as here:
    if os.fork() == 0:
        worker = subprocess.Popen(["sleep", "600"], env={**os.environ, "TMPDIR": str(here.folder)})
        print(os.getpid(), worker.pid, here.folder, here.weights_folder, flush=True)
    sys.stdin.readline()
"""


class Run:
    """Holds the processes and the two folders of a run."""

    def __init__(self, temporary: Path, shared_memory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(shared_memory)],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        controller, worker, folder, weights = self._process.stdout.readline().split()
        self.supervisor, self.controller, self.worker = self._process.pid, int(controller), int(worker)
        self.folders = [Path(folder), Path(weights)]

    def kill_supervisor(self) -> None:
        self._process.kill()
        self._process.wait(END_S)

    def kill_controller(self) -> None:
        """Kills the controller and waits until the kernel has closed its files."""
        os.kill(self.controller, 9)
        deadline = time.monotonic() + END_S
        while not has_exited(self.controller):
            assert time.monotonic() < deadline, process_state(self.controller)
            time.sleep(0.005)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        for pid in (self.controller, self.worker):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._process.wait(END_S)
        self._process.stdout.close()


def has_exited(pid: int) -> bool:
    return process_state(pid) in EXITED


@contextmanager
def started(folder: Path) -> Iterator[Run]:
    run = Run(folder / "t", folder / "s")
    try:
        yield run
    finally:
        run.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yields a folder with a short path, because socket names are limited."""
    with tempfile.TemporaryDirectory(prefix="r") as name:
        (Path(name) / "t").mkdir()
        (Path(name) / "s").mkdir()
        yield Path(name)


def removed(folder: Path) -> list[paths.StaleRun]:
    return paths.remove_stale_runs(temporary=folder / "t", shared_memory=folder / "s")


def test_a_run_that_lives_keeps_all_and_a_dead_one_nothing(folder: Path) -> None:
    with started(folder) as running, started(folder) as killed:
        assert removed(folder) == []
        killed.kill_supervisor()
        assert removed(folder) == [], "its controller may be writing the last checkpoint"
        killed.kill_controller()
        assert not has_exited(killed.worker)

        temporary, weights = removed(folder)
        assert [temporary.folder, weights.folder] == killed.folders
        assert not any(path.exists() for path in killed.folders)
        assert temporary.pids == (killed.worker,) and has_exited(killed.worker)
        owner = f"of the run in /runs/one (process {killed.supervisor} of {socket.gethostname()}), which was killed"
        assert str(temporary) == f"{temporary.folder} and processes {killed.worker} {owner}"
        assert all(path.exists() for path in running.folders) and not has_exited(running.worker)
        assert removed(folder) == []


def test_what_is_only_looked_at_stays(folder: Path) -> None:
    with started(folder) as run:
        run.kill_supervisor()
        run.kill_controller()
        looked = paths.find_stale_runs(temporary=folder / "t", shared_memory=folder / "s")
        assert [stale_run.folder for stale_run in looked] == run.folders
        assert all(path.exists() for path in run.folders) and not has_exited(run.worker)
        assert removed(folder) == looked


@pytest.fixture
def server_name() -> Iterator[str]:
    """Yields the name of an SGLang server's folder. The server's semaphore in shared memory remains after a kill."""
    name = f"relax-sglang-{secrets.token_hex(4)}"
    semaphore = Path(f"/dev/shm/sem.{name}-a")
    semaphore.touch()
    yield name
    left = semaphore.exists()
    semaphore.unlink(missing_ok=True)
    assert not left


def test_what_a_server_left_goes_with_its_dead_run(folder: Path, server_name: str) -> None:
    with started(folder) as run:
        (run.folders[0] / server_name).mkdir()
        run.kill_supervisor()
        run.kill_controller()
        assert removed(folder)


def test_what_a_server_left_goes_with_the_paths(
    folder: Path, server_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was killed together with its owner, like all services that restart from a checkpoint."""
    monkeypatch.setattr("tempfile.tempdir", str(folder / "t"))
    with run_paths(run_dir=folder / "run") as here:
        (here.folder / server_name).mkdir()


def test_run_paths_leave_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "SHARED_MEMORY", folder / "s")
    monkeypatch.setattr("tempfile.tempdir", str(folder / "t"))
    with run_paths(run_dir=folder / "run") as here:
        assert here.folder.parent == folder / "t" and here.weights_folder.parent == folder / "s"
        assert removed(folder) == []
    assert list((folder / "t").iterdir()) == list((folder / "s").iterdir()) == []


def test_what_is_not_surely_a_dead_runs_is_left(folder: Path) -> None:
    being_made, linked, other_folder = (folder / "t" / f"rlx-{name}" for name in ("new", "link", "other"))
    being_made.mkdir()
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / OWNER_FILE).touch()
    linked.symlink_to(folder / "elsewhere")
    other_folder.mkdir()
    (other_folder / OWNER_FILE).touch()
    if os.getuid() == 0:
        os.chown(other_folder, 12345, 12345)
    else:
        other_folder.rename(folder / "not-looked-at")
    assert removed(folder) == []
    assert being_made.exists() and (folder / "elsewhere").exists()


def test_two_that_clean_at_one_time_do_not_meet(tmp_path: Path) -> None:
    with owned(tmp_path, "somebody"):
        pass
    with claimed(tmp_path) as first, claimed(tmp_path) as second:
        assert first and not second


def test_a_tmpdir_that_is_too_long_for_sockets_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/" + "t" * (paths.BASE_BYTES - 1))
    assert paths.temporary_folder() == Path(tempfile.gettempdir())
    monkeypatch.setattr("tempfile.tempdir", "/" + "t" * paths.BASE_BYTES)
    assert paths.temporary_folder() == Path("/tmp")


def test_weights_that_a_killed_command_left_in_the_runs_folder_go(tmp_path: Path) -> None:
    left = tmp_path / "relax-1-abc" / "0" / "00000003"
    left.mkdir(parents=True)
    (left / "model.safetensors").touch()
    (tmp_path / "checkpoints").mkdir()
    paths.remove_left_weights(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


# The supervisor exits at once; its fork runs until its stdin ends, like the controller.
FORKED = """
import os, sys
from pathlib import Path
from relax_core.control.host.run_paths import run_lock
with run_lock(Path(sys.argv[1])):
    if os.fork():
        os._exit(0)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    refused = f"run.dir={tmp_path}: another run uses it, process {os.getpid()} of "
    with run_lock(tmp_path), pytest.raises(ValueError, match=refused):
        run_lock(tmp_path).__enter__()
    with run_lock(tmp_path):
        pass


def test_a_fork_holds_it_until_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert process.wait(60) == 0
        with pytest.raises(ValueError, match=f"process {process.pid} of "):
            run_lock(tmp_path).__enter__()
        process.stdin.close()
        with run_lock(tmp_path, wait_s=60.0):
            pass
