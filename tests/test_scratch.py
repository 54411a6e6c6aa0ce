"""Tests that remains of tests are reported and removed. The next session removes the remains of a killed session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_core.control.host.run_paths import SHARED_MEMORY, owned
from tests import scratch
from tests.scratch import Scratch, processes_in

ROOT = Path(__file__).resolve().parents[1]
KILLED = """
import os, signal, subprocess
from tests.scratch import Scratch
folder = Scratch().folder
environment = {**os.environ, "TMPDIR": str(folder)}
subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
print(folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def own_scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scratch]:
    monkeypatch.setattr(scratch, "GONE_S", 0.0)
    made = Scratch()
    yield made
    if made.folder.exists():
        made.close()


def test_without_remains_nothing_is_reported(own_scratch: Scratch) -> None:
    assert own_scratch.left() == []
    own_scratch.close()
    assert not own_scratch.folder.exists()


def test_remaining_folders_memory_and_processes_are_reported_with_their_test(own_scratch: Scratch) -> None:
    weights = SHARED_MEMORY / f"relax-0-{os.urandom(4).hex()}"
    weights.mkdir()
    with owned(weights, f"a run, beside {own_scratch.folder}/rlx-1"):
        pass
    own_scratch.note("test_a")
    (own_scratch.folder / "left").touch()
    own_scratch.note("test_b")
    environment = {**os.environ, "TMPDIR": str(own_scratch.folder), "PYTEST_CURRENT_TEST": "test_c (call)"}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        assert own_scratch.left() == [
            f"{weights}, first seen after test_a",
            f"{own_scratch.folder}/left, first seen after test_b",
            f"process {process.pid}: sleep 600 (of test_c (call))",
        ]
        own_scratch.close()
    assert process.returncode == -signal.SIGKILL
    assert not weights.exists() and not own_scratch.folder.exists()


def test_a_killed_session_is_removed_by_the_next(own_scratch: Scratch) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    Scratch().close()
    folder = Path(killed.stdout.strip())
    assert not folder.exists() and not processes_in(folder)
    assert own_scratch.folder.exists(), "this one lives"
