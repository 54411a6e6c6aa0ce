"""`.ci/run` ends with the first stage that fails, and tells how many seconds each stage took."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAGES = ["lint", "slurm", "test-slurm", "sandbox", "extras", "sglang", "agents", "test-chaos", "test"]
STUB = """#!/usr/bin/env bash
echo "stage {name} $*"
[ "{name}" != "$FAILS" ]
"""


def ci(folder: Path, *, fails: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a copy of the script with stages that only say their names; ``fails``: the stage that ends with status 1."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    programs = {
        folder / ".ci" / "sglang": STUB.format(name="sglang"),
        folder / ".ci" / "agents": STUB.format(name="agents"),
        folder / "make": '#!/usr/bin/env bash\necho "stage $*"\n[ "$1" != "$FAILS" ]\n',
        folder / "id": "#!/usr/bin/env bash\necho 0\n",
    }
    for path, text in programs.items():
        path.write_text(text)
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FAILS": fails}
    return subprocess.run([folder / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60)


def test_all_stages_run_and_tell_their_seconds_before_the_last_one(tmp_path: Path) -> None:
    done = ci(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.findall(r"^stage (\S+)", done.stdout, re.MULTILINE) == STAGES
    told = ["lint", "test-slurm", "test-sglang", "test-agents", "test-chaos"]
    assert [line.split()[1] for line in lines if re.fullmatch(r"relax: \S+ took \d+ s", line)] == told
    assert lines[-1] == "stage test ARGS=--durations=30"


@pytest.mark.parametrize("stage", [name for name in STAGES if name not in ("slurm", "sandbox", "extras")])
def test_a_stage_that_fails_ends_the_script(tmp_path: Path, stage: str) -> None:
    done = ci(tmp_path, fails=stage)
    assert done.returncode != 0
    assert re.findall(r"^stage (\S+)", done.stdout, re.MULTILINE)[-1] == stage


def test_a_machine_without_slurm_skips_it_and_says_so(tmp_path: Path) -> None:
    done = ci(tmp_path, fails="slurm")
    assert done.returncode == 0
    assert "make test-slurm is skipped" in done.stdout and "stage test-slurm" not in done.stdout


def test_a_machine_without_bubblewrap_says_so(tmp_path: Path) -> None:
    done = ci(tmp_path, fails="sandbox")
    assert done.returncode == 0 and "the tests of the sandbox are skipped" in done.stdout


def test_a_machine_that_cannot_build_the_extras_says_so(tmp_path: Path) -> None:
    done = ci(tmp_path, fails="extras")
    assert done.returncode == 0 and "the tests of further environments and rewards are skipped" in done.stdout
