"""Tests that no other user can read, list or lock a file of a run, or create a folder in place of a Relax folder."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchers.slurm.task_identity import task_folder
from relax_core.__main__ import main
from relax_core.contracts.private_folder import COMPILE_CACHE, private_folder, set_compile_cache, user_cache
from tests.security.conftest import INTRUDER, SecondUser

ROOT = Path(__file__).resolve().parents[2]
# Tries to access all files of the run until a line arrives on stdin, and prints its successes.
SPY = """
import fcntl, json, os, select, socket, stat, sys
victim, roots = int(sys.argv[1]), sys.argv[2:]
found, looks = set(), 0

def attempt(what, path, act):
    try:
        act()
        found.add(f"{what} {path}")
    except OSError:
        pass

def lock(path):
    with open(path, "rb", buffering=0) as file:
        found.add(f"read {path}")
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)

def look(folder):
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            state = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISDIR(state.st_mode):
            if state.st_uid == victim and entry.path not in roots:
                attempt("listed", entry.path, lambda: os.listdir(entry.path))
                attempt("wrote into", entry.path, lambda: os.mkdir(os.path.join(entry.path, "spy")))
            look(entry.path)
        elif state.st_uid == victim and stat.S_ISREG(state.st_mode):
            attempt("locked", entry.path, lambda: lock(entry.path))
            attempt("wrote", entry.path, lambda: os.close(os.open(entry.path, os.O_WRONLY)))

def connect(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(path)

sockets = set()
while not select.select([sys.stdin], [], [], 0.05)[0]:
    looks += 1
    for root in roots:
        look(root)
    for row in open("/proc/net/unix"):
        path = row.split()[-1]
        if any(path.startswith(f"{root}/") for root in roots):
            sockets.add(path)
            attempt("connected", path, lambda: connect(path))
print(json.dumps([looks, len(sockets), sorted(found)]))
"""
SQUATTER = """
import os, sys
for path in sys.argv[1:]:
    os.mkdir(path, 0o777)
    os.chmod(path, 0o777)
"""


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_tmp() -> Iterator[Path]:
    """Makes a folder like /tmp: every user may create files in it. Its path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def test_a_second_user_can_do_nothing_with_the_files_of_a_run(
    shared_folder: Path, open_tmp: Path, second_user: SecondUser
) -> None:
    """Before the run starts, the second user creates all folders with predictable names."""
    squats = [open_tmp / f"torchinductor_{name}" for name in (os.getuid(), getpass.getuser())] + [open_tmp / "ray"]
    assert second_user.run(SQUATTER, *squats).returncode == 0
    run_dir = shared_folder / "runs" / "one"
    environment = {**os.environ, "TMPDIR": str(open_tmp)}
    environment.pop(COMPILE_CACHE, None)
    overrides = [f"run.dir={run_dir}", "run.steps=2", "gateway=local", "run.panel=false"]
    with second_user.popen(SPY, os.getuid(), shared_folder, open_tmp, "/dev/shm") as spy:
        done = subprocess.run(
            [sys.executable, "-m", "relax_core", *overrides],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            umask=0o022,
            timeout=240,
        )
        output, _ = spy.communicate("\n", timeout=60)
    assert done.returncode == 0, done.stderr
    looks, sockets, found = json.loads(output)
    assert looks > 20 and sockets >= 3 and found == []
    assert (run_dir / "ledger.sqlite").exists() and not any(any(squat.iterdir()) for squat in squats)
    assert set(open_tmp.iterdir()) == set(squats), "the run removes all its files there"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relax"
    assert {mode_of(path) for path in (run_dir, run_dir.parent, cache)} == {0o700}
    opened = [path for path in run_dir.rglob("*") if not path.is_symlink() and mode_of(path) & 0o077]
    assert opened == [], "a file that is moved or copied out of the folder would be readable by others"


@pytest.mark.parametrize("command", ["train", "export"])
def test_no_command_writes_what_others_may_change(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users may read exported files if the user's umask allows it. The caller's umask does not change."""
    made = tmp_path / "made"

    def act(*words: object, **named: object) -> int:
        made.touch(mode=0o666)
        return 0

    monkeypatch.setattr("relax_core.__main__._run", act)
    monkeypatch.setattr("relax_core.__main__._tool", act)
    earlier = os.umask(0o002)
    try:
        assert main([command]) == 0
        assert mode_of(made) == {"train": 0o600, "export": 0o644}[command]
        assert os.umask(0o002) == 0o002
    finally:
        os.umask(earlier)


def test_an_existing_folder_of_the_user_becomes_private(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    (folder / "earlier").touch()
    assert private_folder(folder, key="run.dir") == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "earlier").exists()


def test_missing_parents_are_private_too(tmp_path: Path) -> None:
    private_folder(tmp_path / "a" / "b" / "c", key="run.dir")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")} == {0o700}
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


def test_a_link_of_another_user_above_the_folder_is_refused(
    open_tmp: Path, tmp_path: Path, second_user: SecondUser
) -> None:
    """The link leads to a valid folder now, but could lead to another folder right after the check."""
    link = open_tmp / "team"
    assert second_user.run("import os, sys; os.symlink(sys.argv[1], sys.argv[2])", tmp_path, link).returncode == 0
    with pytest.raises(ValueError, match=rf"run\.dir=.*{link}.*uid {INTRUDER}"):
        private_folder(link / "runs" / "one", key="run.dir")
    assert list(tmp_path.iterdir()) == [], "nothing is created through the link"


@pytest.mark.parametrize("target", ["real", "../{folder.name}/real", "{folder}/real"])
def test_links_of_the_user_are_followed(open_tmp: Path, target: str) -> None:
    (open_tmp / "real").mkdir(mode=0o755)
    (open_tmp / "link").symlink_to(target.format(folder=open_tmp))
    private_folder(open_tmp / "link" / ".." / "link" / "run", key="run.dir")
    assert mode_of(open_tmp / "real" / "run") == 0o700 and mode_of(open_tmp / "real") == 0o755


def test_links_in_a_circle_end_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        private_folder(tmp_path / "a" / "run", key="run.dir")


def test_a_folder_that_all_users_share_keeps_its_mode(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fchmod", lambda *arguments: pytest.fail("the mode of a shared folder is changed"))
    for shared in [open_tmp, Path("/")] if os.getuid() == 0 else [open_tmp]:
        with pytest.raises(ValueError, match=r"run\.dir=.*below"):
            private_folder(shared, key="run.dir")


def test_a_changed_mode_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir(mode=0o750)
    for _ in range(2):
        private_folder(tmp_path / "run", key="run.dir")
    assert capsys.readouterr().err.count("0700") == 1


def test_links_of_others_do_not_stop_a_slurm_task(
    open_tmp: Path, second_user: SecondUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The links have the names of killed tasks' folders. One link is broken, and one leads to a folder of the user."""
    kept = open_tmp / "kept"
    kept.mkdir()
    program = "import os, sys\nfor path, target in zip(sys.argv[1::2], sys.argv[2::2]): os.symlink(target, path)"
    names = [open_tmp / "rs1-abcdef", "/nothing", open_tmp / "rs1-abcdeg", kept]
    assert second_user.run(program, *names).returncode == 0
    monkeypatch.setattr("launchers.slurm.task_identity.tempfile.gettempdir", lambda: str(open_tmp))
    monkeypatch.setattr("launchers.slurm.task_identity.BASE_BYTES", 100)
    monkeypatch.setattr("launchers.slurm.task_identity.slurm_answer", lambda *words: pytest.fail("nothing is stale"))
    with task_folder("7") as folder:
        assert folder.parent == open_tmp and mode_of(folder) == 0o700
    assert kept.is_dir()


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


def test_a_cache_that_cannot_be_made_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nocache")
    with pytest.raises(OSError, match=r"XDG_CACHE_HOME=/proc/nocache/relax/models: .* cannot be made"):
        private_folder(user_cache("models"), key="XDG_CACHE_HOME")
