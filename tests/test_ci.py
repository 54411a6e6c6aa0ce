"""Tests that `.ci/run` ends at the first stage that fails, and prints the seconds of each stage."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Without one of these programs, the tests that need it are skipped.
INSTALLS = (
    "sandbox",
    "dashboard-browser",
    "extras",
    "slurm",
    "environments",
    "trackers-env",
    "real-env",
    "docs-env",
)
STAGES = [
    *(
        "test-env",
        "sandbox",
        "dashboard-browser",
        "extras",
        "slurm",
        "lint",
        "test-slurm",
        "docs-env",
        "docs",
    ),
    "test-security",
    *("environments", "sglang", "agents", "trackers-env", "test-trackers", "real-env", "test-real"),
    *("test-whole-runs", "test-chaos", "test"),
]
STUB = """#!/usr/bin/env bash
echo "stage {name} $*"
echo "minutes $RELAX_{upper}_MINUTES"
[ "{name}" != "$FAILS" ]
"""


def ci(folder: Path, *, fails: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a copy of the script with stages that only print their names. The stage ``fails`` exits with status 1."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    programs = {
        folder / ".ci" / "sglang": STUB.format(name="sglang", upper="SGLANG"),
        folder / ".ci" / "agents": STUB.format(name="agents", upper="AGENTS"),
        folder / "make": '#!/usr/bin/env bash\necho "stage $*"\n[ "$1" != "$FAILS" ]\n',
        folder / "id": "#!/usr/bin/env bash\necho 0\n",
        folder / "df": "#!/usr/bin/env bash\necho 20G\n",
    }
    for path, text in programs.items():
        path.write_text(text)
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FAILS": fails, **variables}
    return subprocess.run([folder / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60)


def test_all_stages_run_and_print_their_seconds_before_the_last_stage(tmp_path: Path) -> None:
    done = ci(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.findall(r"^stage (\S+)", done.stdout, re.MULTILINE) == STAGES
    told = [
        "lint",
        "test-slurm",
        "docs",
        "test-security",
        "environments",
        "test-sglang",
        "test-agents",
        "test-trackers",
    ]
    told += ["test-real", "test-runs", "test-chaos"]
    assert [line.split()[1] for line in lines if re.fullmatch(r"relax: \S+ took \d+ s", line)] == told
    assert lines[-1] == "stage test ARGS=--durations=30"


@pytest.mark.parametrize("stage", [name for name in STAGES if name not in INSTALLS])
def test_a_stage_that_fails_ends_the_script(tmp_path: Path, stage: str) -> None:
    done = ci(tmp_path, fails=stage)
    assert done.returncode != 0
    assert re.findall(r"^stage (\S+)", done.stdout, re.MULTILINE)[-1] == stage


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("slurm", "make test-slurm is skipped"),
        ("sandbox", "the tests of the sandbox are skipped"),
        ("dashboard-browser", "the tests of the page in a browser are skipped"),
        ("extras", "the tests of further environments and rewards are skipped"),
        ("environments", "an environment is not there yet"),
        ("trackers-env", "make test-trackers is skipped"),
        ("real-env", "make test-real is skipped"),
        ("docs-env", "make docs is skipped"),
    ],
)
def test_a_stage_without_its_packages_is_skipped_with_a_message(tmp_path: Path, missing: str, message: str) -> None:
    done = ci(tmp_path, fails=missing)
    assert done.returncode == 0 and message in done.stdout
    assert f"stage test-{missing.removesuffix('-env')}" not in done.stdout


@pytest.mark.parametrize(
    ("seconds", "most", "expected"),
    [
        ("0", {}, ["20", "12"]),
        ("0", {"RELAX_SGLANG_MINUTES": "3"}, ["3", "12"]),
        ("870", {}, ["7", "7"]),
        ("4000", {}, ["0", "0"]),
    ],
)
def test_stages_of_sglang_and_agents_get_the_remaining_minutes(
    tmp_path: Path, seconds: str, most: dict[str, str], expected: list[str]
) -> None:
    done = ci(tmp_path, SECONDS=seconds, **most)  # bash's SECONDS continues from this value
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^minutes (\d+)", done.stdout, re.MULTILINE) == expected


def test_each_file_of_runs_is_in_one_stage_and_a_slow_machine_names_the_files_that_it_leaves_out(
    tmp_path: Path,
) -> None:
    for folder, seconds in (("fast", "2000"), ("slow", "3000")):
        (tmp_path / folder).mkdir()
        done = ci(tmp_path / folder, SECONDS=seconds)
        ignored = re.findall(r"--ignore=(\S+)", re.findall(r"^stage test-whole-runs .*$", done.stdout, re.MULTILINE)[0])
        assert ignored and all((ROOT / path).is_file() for path in ignored)
        begun = re.findall(r"^stage test-chaos RUNS_IN=(.*) ARGS", done.stdout, re.MULTILINE)
        assert begun == ([" ".join(ignored)] if folder == "fast" else [])
        assert (f"{' '.join(ignored)} are skipped" in done.stdout) == (folder == "slow")


@pytest.mark.parametrize(
    ("variable", "markers"), [("RUNS_IN", "integration|chaos"), ("SGLANG_IN", "sglang"), ("REAL_IN", "real")]
)
def test_every_file_with_a_marker_is_where_the_makefile_looks_for_it(variable: str, markers: str) -> None:
    (line,) = re.findall(rf"^{variable} := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    marked = [
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(rf"pytest\.mark\.({markers})\b", text := path.read_text()) and "pytest.mark.agents" not in text
    ]
    assert marked and [path for path in marked if not any(path.is_relative_to(folder) for folder in line.split())] == []
