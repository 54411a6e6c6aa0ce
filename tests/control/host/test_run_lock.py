"""A run's folder is locked for other runs as long as any process of the run exists that may write there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_core.control.host.run_paths import run_lock

ROOT = Path(__file__).resolve().parents[3]

# The supervisor exits at once; its fork goes on until its stdin ends, as the controller does.
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
    refused = f"run.dir={tmp_path}: a run is at work there, process {os.getpid()} of "
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
