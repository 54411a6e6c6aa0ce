"""No other user can read, list or lock a file of a run, or put a folder in the place where Relax makes one."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relax_core.contracts.host.private_folder import COMPILE_CACHE, private_folder, set_compile_cache
from tests.security.conftest import INTRUDER, SecondUser

ROOT = Path(__file__).resolve().parents[2]
# It looks at all that it can reach of the run until the line on its stdin ends, and prints what it could do.
SPY = """
import fcntl, json, os, select, sys
victim, roots = int(sys.argv[1]), sys.argv[2:]
found, looks = set(), 0
while not select.select([sys.stdin], [], [], 0.05)[0]:
    looks += 1
    for root in roots:
        for folder, folders, files in os.walk(root):
            for name in files:
                path = os.path.join(folder, name)
                try:
                    if os.lstat(path).st_uid != victim:
                        continue
                    with open(path, "rb", buffering=0) as file:
                        found.add(f"read {path}")
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        found.add(f"locked {path}")
                except OSError:
                    pass
print(json.dumps([looks, sorted(found)]))
"""
SQUATTER = """
import os, sys
for path in sys.argv[1:]:
    os.mkdir(path, 0o777)
    os.chmod(path, 0o777)
"""


@pytest.fixture
def open_tmp(shared_folder: Path) -> Path:
    """A folder like /tmp: every user may make files there, and only their owner may rename them."""
    folder = shared_folder / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_a_second_user_reads_and_locks_nothing_of_a_run(
    shared_folder: Path, open_tmp: Path, second_user: SecondUser
) -> None:
    """The second user has made the folder of compiled code under torch's own name before the run starts."""
    squat = open_tmp / f"torchinductor_{os.getuid()}"
    assert second_user.run(SQUATTER, squat).returncode == 0
    run_dir = shared_folder / "runs" / "one"
    environment = {**os.environ, "TMPDIR": str(open_tmp)}
    environment.pop(COMPILE_CACHE, None)
    words = [f"run.dir={run_dir}", "run.steps=2", "gateway=local", "run.panel=false", "algo=ppo"]
    with second_user.popen(SPY, os.getuid(), shared_folder, "/dev/shm") as spy:
        done = subprocess.run(
            [sys.executable, "-m", "relax_core", *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        output, _ = spy.communicate("\n", timeout=60)
    assert done.returncode == 0, done.stderr
    looks, found = json.loads(output)
    assert looks > 20 and found == []
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert (run_dir / "ledger.sqlite").exists() and not list(squat.iterdir())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relax"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_an_existing_folder_of_the_user_becomes_private(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    (folder / "earlier").touch()
    assert private_folder(folder, key="run.dir") == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "earlier").exists()


def test_missing_parents_are_private_too(tmp_path: Path) -> None:
    private_folder(tmp_path / "a" / "b" / "c", key="run.dir")
    assert {stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "a").rglob("*")} == {0o700}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_refused(open_tmp: Path, second_user: SecondUser) -> None:
    folder = open_tmp / "run"
    assert second_user.run(SQUATTER, folder).returncode == 0
    with pytest.raises(ValueError, match=rf"run\.dir=.*uid {INTRUDER}.*[Cc]hoose"):
        private_folder(folder, key="run.dir")


def test_a_link_of_another_user_is_refused(open_tmp: Path, tmp_path: Path, second_user: SecondUser) -> None:
    link = open_tmp / "run"
    done = second_user.run("import os, sys; os.symlink(sys.argv[1], sys.argv[2])", tmp_path, link)
    assert done.returncode == 0
    with pytest.raises((ValueError, PermissionError), match="run"):
        private_folder(link, key="run.dir")


def test_a_parent_that_everybody_may_rename_is_refused(shared_folder: Path) -> None:
    parent = shared_folder / "everybody"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(ValueError, match=r"run\.dir=.*chmod o-w"):
        private_folder(parent / "run", key="run.dir")
    parent.chmod(0o1777)
    private_folder(parent / "run", key="run.dir")


def test_compiled_code_lies_in_the_users_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environment: dict[str, str] = {}
    set_compile_cache(environment)
    folder = Path(environment[COMPILE_CACHE])
    assert folder.is_relative_to(tmp_path) and stat.S_IMODE(folder.stat().st_mode) == 0o700
    chosen = {COMPILE_CACHE: "/chosen"}
    set_compile_cache(chosen)
    assert chosen == {COMPILE_CACHE: "/chosen"}


def test_a_run_in_a_folder_of_another_user_ends_before_it_starts(open_tmp: Path, second_user: SecondUser) -> None:
    folder = open_tmp / "run"
    assert second_user.run(SQUATTER, folder).returncode == 0
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "relax_core", f"run.dir={folder}", "run.steps=2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and f"run.dir={folder}" in done.stderr, done.stderr
    assert not list(folder.iterdir()) and time.monotonic() - began < 100
