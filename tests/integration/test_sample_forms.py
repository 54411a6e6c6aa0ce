"""Compares docs/datum.md with a real run: the page lists the forms of a sample and their number of files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
MAX_FORMS = 13
MAX_FILES = 29
LONG_S = 400.0


def test_the_forms_and_files_of_a_sample_are_those_of_the_page(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    smallest = ("run.steps=2", "algo.group_size=2", "rollout.prompts_per_step=1", "eval.every=0")
    run = subprocess.run(
        [sys.executable, "-m", "relax_core", "mode=async", *smallest, f"run.dir={tmp_path / 'run'}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests/form_trace"), "RELAX_FORM_TRACE": str(trace)},
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    met = [line.split() for process in trace.iterdir() for line in process.read_text(encoding="utf-8").splitlines()]
    assert len(list(trace.iterdir())) >= 4, "controller, rollout, trainer and engine must take part"
    files = sorted({file for _, file in met if file.startswith("relax_core/")})
    page = (ROOT / "docs/datum.md").read_text(encoding="utf-8")
    section = page.split("## The forms of a sample")[1].split("\n## ")[0]
    listed = re.findall(r"^\| \d+ \| `(\w+)` \|", section, flags=re.MULTILINE)
    assert sorted(listed) == sorted({form for form, _ in met})
    assert len(listed) <= MAX_FORMS
    counted = re.search(r"(\d+) files meet", section)
    assert counted is not None and int(counted[1]) == len(files) <= MAX_FILES, files
