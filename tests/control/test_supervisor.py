"""The process above the controller, with real forks, signals and orphans; no Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.saved import to_yaml
from relax_core.control.leftovers import find_leftovers, remove_leftovers
from relax_core.control.owned_folder import owned
from relax_core.control.processes import process_state
from relax_core.train.checkpoint_store import BUS_SNAPSHOT, CONFIG, CheckpointStore

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0

PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from relax_core.config.compose import load_config
from relax_core.control.supervisor import supervise

folder = Path(sys.argv[1])
config = load_config([f"run.dir={folder}", "run.max_recoveries=2", *sys.argv[3:]])

def killed_once(config, resume, place, attempt):
    (folder / f"place{attempt.number}").write_text(f"{place.folder}\\n{place.weights_folder}")
    (place.folder / "left").touch()
    if attempt.number == 0:
        orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (folder / "orphan").write_text(str(orphan.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    print(attempt.causes, flush=True)
    return 7

def always_killed(config, resume, place, attempt):
    os.kill(os.getpid(), signal.SIGSEGV)

def frozen_once(config, resume, place, attempt):
    if attempt.number == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return 0

def waits_for_signals(config, resume, place, attempt):
    got = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: got.append(number))
    (folder / "ready").touch()
    deadline = time.monotonic() + 100
    while signal.SIGTERM not in got and time.monotonic() < deadline:
        time.sleep(0.01)  # a SIGINT that came twice is in by then: signals are handed on in order
    print(got, flush=True)
    return 130

def fails(config, resume, place, attempt):
    raise RuntimeError("no such luck")

def exits(config, resume, place, attempt):
    sys.exit(signal.SIGTERM)  # as Ray's handler does

def no_handlers(config, resume, place, attempt):
    (folder / "ready").touch()
    time.sleep(100)
    return 0

assert "ray" not in sys.modules and "torch" not in sys.modules
sys.exit(supervise(config, None, globals()[sys.argv[2]]))
"""


def start(folder: Path, case: str, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), case, *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_ready(folder: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not (folder / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def members(session: int) -> list[str]:
    """Command lines of the processes of a session; a dead one's is empty."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.getsid(int(entry.name)) == session:
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return found


def test_a_killed_controller_is_repeated_and_its_orphans_and_folders_are_gone(tmp_path: Path) -> None:
    process = start(tmp_path, "killed_once")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, err
    assert "killed by SIGKILL" in out and "goes on from step 0" in err
    places = [Path(line) for number in (0, 1) for line in (tmp_path / f"place{number}").read_text().splitlines()]
    assert len(set(places)) == 4 and not any(place.exists() for place in places)
    # The orphan sleeps for 600 s in a session of its own: only a parent that adopted it can have ended it.
    assert process_state(int((tmp_path / "orphan").read_text())) == "gone"


def test_a_controller_that_is_repeated_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    """The newest is damaged: the screen says that it is left, and why."""
    config = load_config([f"run.dir={tmp_path}", "run.max_recoveries=2"])

    def write(folder: Path) -> None:
        (folder / CONFIG).write_text(to_yaml(config))
        (folder / BUS_SNAPSHOT).write_bytes(b"cut")

    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    _, newest = (store.write(step, writers=write, meta={}) for step in (10, 20))
    (newest / BUS_SNAPSHOT).write_bytes(b"cat")
    process = start(tmp_path, "killed_once")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, err
    assert f"resume: step_00000020 is left: {newest / BUS_SNAPSHOT} is corrupt" in err
    assert "the run goes on from step_00000010" in err and "another goes on from step 10" in err


def test_the_limit_ends_it(tmp_path: Path) -> None:
    process = start(tmp_path, "always_killed")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert err.count("another goes on") == 2
    assert "run.max_recoveries=2" in err and "SIGSEGV" in err


def test_a_frozen_controller_is_killed_and_repeated(tmp_path: Path) -> None:
    process = start(tmp_path, "frozen_once", "run.heartbeat_timeout_s=2")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "SIGKILL" in err


def test_each_signal_arrives_once(tmp_path: Path) -> None:
    process = start(tmp_path, "waits_for_signals")
    wait_ready(tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert sorted(eval(out)) == [signal.SIGINT, signal.SIGTERM]


def test_a_controller_that_dies_of_the_stop_is_not_repeated(tmp_path: Path) -> None:
    process = start(tmp_path, "no_handlers")
    wait_ready(tmp_path)
    process.terminate()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM, err


def test_a_stop_that_rays_handler_takes_is_a_stop(tmp_path: Path) -> None:
    process = start(tmp_path, "exits")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err


def test_an_exception_is_shown_and_not_repeated(tmp_path: Path) -> None:
    process = start(tmp_path, "fails")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert err.count("no such luck") == 1


def test_without_its_supervisor_the_controller_is_told_to_stop(tmp_path: Path) -> None:
    process = start(tmp_path, "waits_for_signals")
    wait_ready(tmp_path)
    process.kill()
    out, _ = process.communicate(timeout=DEADLINE_S)  # the pipes close when the controller has ended
    assert f"[{int(signal.SIGTERM)}]" in out.replace("<Signals.SIGTERM: 15>", "15")
    assert "".join(members(process.pid)) == ""
    assert any(f"process {process.pid} of" in leftover.owner for leftover in find_leftovers())
    remove_leftovers()  # what the supervisor would have removed


def test_what_a_killed_run_left_goes_when_the_next_one_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="r") as name:  # short, as names of sockets want it
        monkeypatch.setenv("TMPDIR", name)
        (Path(name) / "rlx-dead").mkdir()
        with owned(Path(name) / "rlx-dead", "the run in /runs/one"):
            pass
        process = start(tmp_path, "exits")
        _, err = process.communicate(timeout=DEADLINE_S)
        assert f"relax: removed {name}/rlx-dead of the run in /runs/one, which was killed" in err
        assert list(Path(name).iterdir()) == []
