"""Tests that the plot is optional: its failure does not end a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_core.observe.event_log import ACTOR, MetricRecord
from relax_core.observe.report import draw_picture, plot_curves

DRAW = """
import os, sys
from pathlib import Path
from relax_core.observe.report import draw_picture, plot_curves
from relax_core.observe.event_log import ACTOR, MetricRecord
records = [MetricRecord(source=ACTOR, step=step, time_s=0.0, values={"reward": 0.5}) for step in (1, 2)]
path, problem = draw_picture(lambda: plot_curves(records, Path(sys.argv[1])))
print(path is not None, problem, os.environ.get("MPLBACKEND"))
"""


def drawn(folder: Path, **environment: str) -> tuple[str, bool]:
    """Draws in a separate process, because matplotlib reads its settings at import."""
    picture = folder / "curves.png"
    done = subprocess.run(
        [sys.executable, "-c", DRAW, str(picture)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), picture.is_file()


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", ""])
def test_a_backend_of_a_notebook_is_not_needed(tmp_path: Path, backend: str) -> None:
    assert drawn(tmp_path, MPLBACKEND=backend) == (f"True None {backend}".strip(), True)


def test_settings_that_cannot_be_read_leave_the_picture_out(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_bytes(b"\xff\xfe")
    printed, made = drawn(tmp_path, MATPLOTLIBRC=str(tmp_path / "matplotlibrc"))
    assert printed.startswith("False UnicodeDecodeError") and not made


def test_a_folder_that_is_missing_leaves_the_picture_out(tmp_path: Path) -> None:
    records = [MetricRecord(source=ACTOR, step=1, time_s=0.0, values={"reward": 0.5})]
    path, problem = draw_picture(lambda: plot_curves(records, tmp_path / "no" / "curves.png"))
    assert path is None and problem is not None and "FileNotFoundError" in problem
