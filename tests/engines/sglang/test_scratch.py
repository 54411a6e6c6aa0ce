"""Tests that all files of a server are named after the server's folder and are removed with this folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from relax_core.contracts.engine import EngineError
from relax_core.engines.sglang.scratch import SHARED_MEMORY, end_session, new_scratch, remove_scratch
from tests.contracts.engine.harness import ROOT

SERVER = """
import multiprocessing, sys, tempfile, time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from relax_core.engines.sglang.scratch import keep_to_scratch

keep_to_scratch(Path(sys.argv[1]))
spawn = multiprocessing.get_context("spawn")

def work(lock):
    more = spawn.Lock()
    print("up", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    memory = SharedMemory(create=True, size=16)
    file = tempfile.NamedTemporaryFile(delete=False)
    lock = spawn.Lock()
    child = spawn.Process(target=work, args=(lock,))
    child.start()
    child.join()
"""


def names(folder: Path) -> set[str]:
    return {name for name in os.listdir(SHARED_MEMORY) if folder.name in name}


def test_a_killed_server_of_several_processes_leaves_nothing(tmp_path: Path) -> None:
    """The server's first process and a child have semaphores and shared memory with names from Python."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    folder = new_scratch()
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        up = process.stdout.readline()
        made = names(folder), os.listdir(folder)
        process.kill()
        process.wait()
        end_session(process.pid, timeout_s=60.0)
    remove_scratch(folder)
    assert up == b"up\n" and len(made[0]) == 3 and len(made[1]) == 1
    assert not names(folder) and not folder.exists()
    remove_scratch(folder)  # a second call has nothing to do


def test_a_temporary_folder_that_is_too_deep_for_sockets_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(EngineError, match=rf"TMPDIR={deep} is \d+ bytes too long"):
        new_scratch()
    assert not list(deep.iterdir())
