"""Tests `pytest -n 2`: tests with a common fixture run on one worker, and each worker reports remains of its tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers import FIRST, RAY, STRICT_RUN, group_of, place_of

ROOT = Path(__file__).resolve().parents[1]
LEAVES = """
import tempfile
from pathlib import Path

def test_leaves():
    (Path(tempfile.gettempdir()) / "left").mkdir()
    print("worker folder", tempfile.gettempdir())

def test_comes_after():
    pass
"""
LEAVES_NOTHING = """
import re
import tempfile
from pathlib import Path

def test_leaves_nothing():
    print("worker folder", tempfile.gettempdir())
    print("began in", re.search(r"\\bTMPDIR=([^\\0]*)", Path("/proc/self/environ").read_text())[1])
"""


def files_with(fixture: str) -> list[str]:
    """Returns the test files and the folders of conftests with a function that uses this session fixture."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        takes = re.search(rf"^ *(async )?def \w+\([^)]*\b{fixture}: ", text, re.MULTILINE)
        if takes and f"def {fixture}(" not in text:
            name = path.relative_to(ROOT).as_posix()
            found.append(name.removesuffix("conftest.py"))
    return found


def test_every_path_of_the_table_is_there() -> None:
    assert [path for path in FIRST if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(("fixture", "paths"), [("ray_session", RAY), ("strict", STRICT_RUN)])
def test_files_that_need_one_thing_of_the_session_stay_together(fixture: str, paths: tuple[str, ...]) -> None:
    users = files_with(fixture)
    assert users
    assert [name for name in users if not name.startswith(paths)] == []


def test_a_file_is_a_group_and_long_groups_begin_first() -> None:
    assert group_of("tests/plan/test_gpus.py::test_a[tests/bus/]") == "tests/plan/test_gpus.py"
    assert (
        group_of("tests/bus/test_payload_blocks.py::test_a") == group_of("tests/control/test_stops.py::test_b") == "Ray"
    )
    ids = ["tests/api/test_a.py::test", "tests/train/test_a.py::test", "tests/integration/test_a.py::test"]
    assert sorted(ids, key=place_of) == ids[::-1]


def test_each_worker_has_a_separate_folder_and_reports_its_remains(tmp_path: Path) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    (tmp_path / "test_leaves_nothing.py").write_text(LEAVES_NOTHING)
    (tmp_path / "hasty.py").write_text("from tests import scratch\n\nscratch.GONE_S = 0.0\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "-rP", "-p", "tests.conftest", "-p", "hasty"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    folders = re.findall(r"^worker folder (\S+)$", done.stdout, re.MULTILINE)
    assert len(set(folders)) == 2, done.stdout
    (left,) = re.findall(r"^E +(\S+), first seen after (\S+)$", done.stdout, re.MULTILINE)
    assert left[0] in {f"{folder}/left" for folder in folders} and left[1] == "test_leaves.py::test_leaves"
    assert re.findall(r"^began in (\S+)$", done.stdout, re.MULTILINE) == [os.environ["TMPDIR"]], (
        "pytest itself has none"
    )
    assert "3 passed, 1 error" in done.stdout
    assert not [folder for folder in folders if Path(folder).exists()]
