"""Tests that examples/one_loop.py runs strictly on-policy without Ray, and leaves no files or processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

FILE = Path(__file__).resolve().parents[1] / "examples/one_loop.py"
STEPS = 3
EPISODES = 8 * 16  # episodes per step, from conf/config.yaml and conf/algo/grpo.yaml
LONG_S = 300.0


def figures(line: str) -> dict[str, str]:
    """Returns the values by name in a line "step 0 reward 0.363 … sampled by weights {0}"."""
    pairs = [part.rsplit(" ", 1) for part in line.split("  ")]
    return {name.strip(): value for name, value in pairs}


def test_the_loop_is_strictly_on_policy_needs_no_ray_and_leaves_nothing(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", str(FILE), f"run.steps={STEPS}"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    imported = set(re.findall(r"^import time:.*\| +(\w+)$", ran.stderr, re.MULTILINE))
    assert "torch" in imported and "ray" not in imported
    *steps, books = ran.stdout.splitlines()
    told = [figures(line) for line in steps]
    assert [row["step"] for row in told] == [str(step) for step in range(STEPS)]
    for step, row in enumerate(told):
        assert row["sampled by weights"] == f"{{{step}}}", "step t trains samples of weight version t"
        assert 0.0 < float(row["log-prob gap"]) <= 2e-5
        assert float(row["ratio"]) == pytest.approx(1.0, abs=2e-5)
        assert 0.2 < float(row["reward"]) < 0.6, "the tiny model begins with a reward between chance and a solved task"
    assert f"issued={STEPS * EPISODES}, trained={STEPS * EPISODES}, dropped={{}}, open=0" in books
    assert list(tmp_path.glob("relax*")) == []
    left = [
        process.info["cmdline"] for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info)
    ]
    assert left == []
