"""Tests that `pip install ".[gpu]"` finds compatible versions. Needs the network and some minutes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from relax_core.engines.sglang.sglang_process import version_problem

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.soak
def test_the_gpu_extra_resolves() -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-input", "--ignore-installed", ".[gpu]"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = re.findall(r"Would install .*\bsglang-(\d\S*)", done.stdout)
    assert version_problem(found) is None
