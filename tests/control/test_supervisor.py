"""Tests the supervisor when controllers die, with real forks and kills. Does not start Ray."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.saved_config import to_yaml
from relax_core.contracts.process_trees import process_state
from relax_core.control.host.run_paths import find_stale_runs, owned, remove_stale_runs
from relax_core.train.checkpoints.checkpoint_store import BUS_SNAPSHOT, CONFIG, DATUM, TOKEN_TREE, CheckpointStore
from tests.control import supervised_cases
from tests.control.supervised_cases import DEADLINE_S, controller_of, start


def members(session: int) -> list[str]:
    """Returns the command lines of a session's processes. An exited process has an empty command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.getsid(int(entry.name)) == session:
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return found


def test_a_killed_controller_is_repeated_and_its_adopted_processes_and_folders_are_removed(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.killed_once)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, err
    assert "killed by SIGKILL" in out and "goes on from step 0" in err
    paths = [Path(line) for number in (0, 1) for line in (tmp_path / f"paths{number}").read_text().splitlines()]
    assert len(set(paths)) == 4 and not any(path.exists() for path in paths)
    # The process sleeps long in a separate session. So only a parent that adopted the process can have ended it.
    assert process_state(int((tmp_path / "adopted").read_text())) == "exited"


def test_a_controller_that_is_repeated_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    """The newest checkpoint is damaged. A message reports the skipped checkpoint and the reason."""
    config = load_config([f"run.dir={tmp_path}", "run.max_recoveries=2"])

    def write(folder: Path) -> None:
        (folder / CONFIG).write_text(to_yaml(config))
        (folder / BUS_SNAPSHOT).write_bytes(b"cut")

    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    _, newest = (store.write(step, writers=write, meta={DATUM: TOKEN_TREE}) for step in (10, 20))
    (newest / BUS_SNAPSHOT).write_bytes(b"cat")
    process = start(tmp_path, supervised_cases.killed_once)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, err
    assert f"resume: step_00000020 is left: {newest / BUS_SNAPSHOT} is corrupt" in err
    assert "the run goes on from step_00000010" in err and "another goes on from step 10" in err


def test_the_limit_ends_it(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.always_killed)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert err.count("another goes on") == 2
    assert "run.max_recoveries=2" in err and "SIGSEGV" in err


def test_recoveries_within_a_controller_count_too(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.killed_after_two_recoveries)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert err == "relax: failed: the controller was killed by SIGKILL; run.max_recoveries=2\n"


def test_a_frozen_controller_is_killed_and_repeated(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.frozen_once, "run.heartbeat_timeout_s=2")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "SIGKILL" in err


def test_one_that_ends_without_a_word_has_died(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.exits_once)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, err
    assert "the controller ended without a report, with exit code 1; another goes on from step 0" in err
    assert "with exit code 1" in out, "the next controller knows the cause"


def test_one_that_lost_its_ray_is_repeated_with_that_cause(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.loses_ray_once)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, err
    assert "relax: Ray's GCS died, and the controller with it; another goes on from step 0" in err
    assert "Ray's GCS died" in out


def test_a_controller_without_descriptors_is_repeated(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.lacks_descriptors_once)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, err
    assert "Too many open files" in err and "another goes on from step 0" in err and "Too many open files" in out


def test_a_ray_that_does_not_start_is_tried_again_and_no_recovery(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.third_ray_starts, "run.max_recoveries=0")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (7, "attempt 0\n")
    assert [line.partition("Ray is started again, ")[2] for line in err.splitlines()] == [
        "2 of 3 times.",
        "3 of 3 times.",
    ]


def test_a_ray_that_never_starts_is_reported(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.no_ray_starts)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert err.splitlines()[-1] == "relax: failed: Ray did not start."
    assert err.count("Ray did not start") == 3 and "Traceback" not in err


def test_an_exception_is_shown_and_not_repeated(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.fails)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert err.count("RuntimeError: no such luck") == 1


def test_without_its_supervisor_the_controller_stops(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.trains_until_stopped)
    controller_of(tmp_path)
    process.kill()
    process.communicate(timeout=DEADLINE_S)  # the controller's end closes the pipes
    assert (tmp_path / "checkpoint").exists()
    assert "".join(members(process.pid)) == ""
    assert any(f"process {process.pid} of" in stale_run.owner for stale_run in find_stale_runs())
    remove_stale_runs()  # a living supervisor would have done this


def test_what_a_killed_run_left_goes_when_the_next_one_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="r") as name:  # socket names need a short path
        monkeypatch.setenv("TMPDIR", name)
        (Path(name) / "rlx-dead").mkdir()
        with owned(Path(name) / "rlx-dead", "the run in /runs/one"):
            pass
        process = start(tmp_path, supervised_cases.returns_3)
        _, err = process.communicate(timeout=DEADLINE_S)
        assert f"relax: removed {name}/rlx-dead of the run in /runs/one, which was killed" in err
        assert list(Path(name).iterdir()) == []
