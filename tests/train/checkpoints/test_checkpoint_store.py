"""Tests that checkpoints on disk are complete or absent, also on a full disk and after a kill."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core.train.checkpoints.checkpoint_store import (
    META,
    CheckpointStore,
    atomic_folder,
    has_checkpoint,
    recover_replaced,
    remove_folder,
    unremoved,
)


def writes(name: str, data: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "rank").mkdir()
        (folder / "rank" / name).write_bytes(data)

    return write


def newest(store: CheckpointStore) -> Path:
    """Returns the newest complete checkpoint, and asserts that the store skipped no checkpoint."""
    found = store.newest_valid()
    assert found is not None and found.left == ()
    return found.folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_write_then_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=2)
    assert store.newest_valid() is None
    folder = store.write(100, writers=writes("weights", b"abc"), meta={"config_digest": "d1"})
    assert folder == tmp_path / "run" / "checkpoints" / "step_00000100" == newest(store)
    meta = store.verify(folder)
    assert (meta.step, meta.sequence, meta.run) == (100, 0, {"config_digest": "d1"})
    assert meta.libraries["torch"].startswith("2.") and meta.provenance.startswith("relax-core ")
    assert {name: file.bytes for name, file in meta.files.items()} == {"rank/weights": 3}
    assert (folder / "rank" / "weights").read_bytes() == b"abc"
    assert json.loads((folder / META).read_text())["content"]["step"] == 100  # other tools can read it as plain JSON


def test_what_is_to_be_kept_stays_beside_the_newest(tmp_path: Path) -> None:
    kept = {20}
    store = CheckpointStore(tmp_path, keep_last=1, kept=lambda: kept)
    for step in (10, 20, 30, 40):
        store.write(step, writers=writes("w", b"x"), meta={})
    assert names(tmp_path) == ["step_00000020", "step_00000040"]
    store.name_best(20)
    store.name_best(30)  # step 30 was already removed
    assert os.readlink(tmp_path / "best") == "step_00000020"
    assert store.verify(tmp_path / "best").step == 20
    newest = store.newest_valid()
    assert newest is not None and newest.folder == tmp_path / "step_00000040"
    kept.clear()
    kept.add(40)
    store.name_best(40)
    store.write(50, writers=writes("w", b"x"), meta={})
    assert names(tmp_path) == ["best", "step_00000040", "step_00000050"]
    assert os.readlink(tmp_path / "best") == "step_00000040"


def test_newest_is_the_one_written_last(tmp_path: Path) -> None:
    """A run that resumed from step 10 and reached step 20 must not load the abandoned step 30."""
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (10, 30, 20):
        store.write(step, writers=writes("w", b"x"), meta={})
    assert newest(store) == tmp_path / "step_00000020"
    assert names(tmp_path) == ["step_00000020", "step_00000030"]
    store.write(30, writers=writes("w", b"new"), meta={})
    assert (tmp_path / "step_00000030" / "rank" / "w").read_bytes() == b"new"
    assert newest(store) == tmp_path / "step_00000030"
    assert names(tmp_path) == ["step_00000020", "step_00000030"]


def test_newest_ignores_what_is_not_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    good = store.write(10, writers=writes("w", b"x"), meta={})
    for broken, text in (("step_00000020", None), ("step_00000030", "{"), ("step_00000040", '{"step": 40}')):
        (tmp_path / broken).mkdir()
        if text is not None:
            (tmp_path / broken / META).write_text(text)
    (tmp_path / ".step_00000050.partial").mkdir()
    whole = store.newest_valid()
    assert whole is not None and whole.folder == good
    assert [left.split(" is left: ")[0] for left in whole.left] == ["step_00000020", "step_00000030", "step_00000040"]
    store.write(60, writers=writes("w", b"x"), meta={})
    assert ".step_00000050.partial" not in names(tmp_path)


def test_corrupt_checkpoint_names_the_file_and_the_way_out(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    older = store.write(10, writers=writes("w", b"good"), meta={})
    bad = store.write(20, writers=writes("w", b"good"), meta={})
    (bad / "rank" / "w").write_bytes(b"goof")
    with pytest.raises(ValueError, match=rf"{bad}/rank/w is corrupt.*resume={older}\."):
        store.verify(bad)
    (bad / "rank" / "w").write_bytes(b"goo")
    with pytest.raises(ValueError, match=rf"{bad}/rank/w has 3 bytes, but was written with 4.*resume={older}"):
        store.verify(bad)
    (bad / "rank" / "w").unlink()
    with pytest.raises(ValueError, match=rf"{bad}/rank/w: No such file.*resume={older}"):
        store.verify(bad)
    (bad / "rank" / "w").write_bytes(b"good")
    assert store.verify(bad).step == 20
    (bad / META).write_text('{"step": "x"}')
    with pytest.raises(ValueError, match=rf"{bad}/meta.json cannot be read.*resume={older}"):
        store.read_meta(bad)
    with pytest.raises(ValueError, match=r"meta\.json is not there"):
        store.read_meta(tmp_path / "step_00000099")


def test_meta_has_a_digest_of_its_own_and_the_folder_its_step(tmp_path: Path) -> None:
    """A digest protects meta.json. A copy named "best" is valid, but a folder with a wrong step number is not."""
    store = CheckpointStore(tmp_path, keep_last=3)
    folder = store.write(20, writers=writes("w", b"x"), meta={"version": 20})
    text = (folder / META).read_text()
    for old, new in (
        ('"step": 20', '"step": 29'),
        ('"sequence": 0', '"sequence": 9'),
        ('"version": 20', '"version": 2'),
    ):
        assert old in text
        (folder / META).write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=r"meta\.json cannot be read: its digest does not agree"):
            store.verify(folder)
    (folder / META).write_text(text)
    copy = shutil.copytree(folder, tmp_path / "best")
    assert store.verify(copy).step == 20
    renamed = folder.rename(tmp_path / "step_00000030")
    with pytest.raises(ValueError, match=r"is of step 20, which is not the step of its folder's name"):
        store.verify(renamed)


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"There is no other checkpoint in {tmp_path}"):
        CheckpointStore.read_meta(tmp_path / "step_00000010")
    with pytest.raises(ValueError, match=r"run\.keep_last=0: keep at least 1"):
        CheckpointStore(tmp_path, keep_last=0)


def test_a_failing_writer_leaves_the_old_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(10, writers=writes("w", b"old"), meta={})

    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise RuntimeError("rank 1 was lost")

    for step in (10, 20):
        with pytest.raises(RuntimeError, match="rank 1 was lost"):
            store.write(step, writers=fail, meta={})
        assert names(tmp_path) == ["step_00000010"]
    assert store.verify(tmp_path / "step_00000010").step == 10


def test_full_disk_at_any_moment(small_disk: Callable[[str], Path]) -> None:
    """The free space grows page by page from zero, so every write of a checkpoint fails once."""
    disk = small_disk("1m")
    root = disk / "checkpoints"
    store = CheckpointStore(root, keep_last=1)
    old = store.write(10, writers=writes("w", b"o" * 50_000), meta={})
    # This meta.json is longer than a page, so its write can fail in the middle.
    meta = {"config": "c" * 10_000}
    ballast = disk / "ballast"
    failures = 0
    while True:
        ballast.unlink(missing_ok=True)
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        room = failures * 4096
        ballast.write_bytes(b"b" * (free - room))
        try:
            store.write(20, writers=writes("w", b"n" * 20_000), meta=meta)
            break
        except OSError as error:
            failures += 1
            text = str(error)
        assert f"{root}/step_00000020 was not written: No space left on device" in text
        assert f"bytes are free in {root}" in text
        assert names(root) == ["step_00000010"]
        assert newest(store) == old
    assert failures >= 6  # five pages of payload and at least one of meta.json
    assert names(root) == ["step_00000020"]
    assert store.verify(root / "step_00000020").step == 20


KILLED = """
import os, signal, sys
from pathlib import Path
from relax_core.train.checkpoints import checkpoint_store as module
real_rename = os.rename
left = int(sys.argv[2])
def rename(source, target):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    real_rename(source, target)
module.os.rename = rename
root, name = os.path.split(sys.argv[1])
if name.startswith("step_"):
    from relax_core.train.checkpoints.checkpoint_store import CheckpointStore
    writers = lambda folder: (folder / "file").write_text("new")
    CheckpointStore(Path(root), keep_last=3).write(int(name[5:]), writers=writers, meta={})
else:
    with module.atomic_folder(Path(sys.argv[1])) as folder:
        (folder / "file").write_text("new")
"""


def killed_while_writing(target: Path, *, renames_before_the_kill: int) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(target), str(renames_before_the_kill)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL


@pytest.mark.parametrize("renames_before_the_kill", [0, 1])
def test_killed_while_replacing(tmp_path: Path, renames_before_the_kill: int) -> None:
    """A new folder replaces an old folder by two renames. The process is killed before each rename."""
    target = tmp_path / "folder"
    with atomic_folder(target) as folder:
        (folder / "file").write_text("old")
    killed_while_writing(target, renames_before_the_kill=renames_before_the_kill)
    with pytest.raises(RuntimeError, match="not now"), atomic_folder(target) as folder:
        raise RuntimeError("not now")
    assert (target / "file").read_text() == "old"
    assert names(tmp_path) == ["folder"]


def test_a_checkpoint_that_was_just_being_replaced_is_found(tmp_path: Path) -> None:
    """After a kill between the two renames, both folders of the step have hidden names."""
    store = CheckpointStore(tmp_path, keep_last=3)
    old = store.write(20, writers=writes("file", b"old"), meta={})
    killed_while_writing(old, renames_before_the_kill=1)
    assert names(tmp_path) == [".step_00000020.partial", ".step_00000020.replaced"]
    assert has_checkpoint(tmp_path)
    recover_replaced(tmp_path)
    assert newest(store) == old
    store.write(30, writers=writes("file", b"next"), meta={})
    assert names(tmp_path) == ["step_00000020", "step_00000030"]


def test_what_was_replaced_goes_where_the_new_one_is_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    new = store.write(20, writers=writes("w", b"new"), meta={})
    (tmp_path / ".step_00000020.replaced").mkdir()  # a process was killed before it removed this folder
    recover_replaced(tmp_path)
    assert (new / "rank" / "w").read_bytes() == b"new"
    store.write(30, writers=writes("w", b"next"), meta={})
    assert names(tmp_path) == ["step_00000020", "step_00000030"]


def test_the_progress_of_a_write_is_what_came_to_the_disk(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    seen = []

    def write(folder: Path) -> None:
        for size in (100, 100, 250):  # the progress is the file's size, also if the file is written again
            (folder / "rank").mkdir(exist_ok=True)
            (folder / "rank" / "w").write_bytes(b"x" * size)
            seen.append(store.progress(20))
        assert store.progress(10) == 0  # another checkpoint

    store.write(20, writers=write, meta={})
    assert seen == [100, 100, 250]
    assert store.progress(20) == 500  # the progress counts the bytes twice: for the digest and for the sync


def test_importing_the_store_does_not_import_torch() -> None:
    code = "import sys, relax_core.train.checkpoints.checkpoint_store\n"
    code += "sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.fixture
def protected(monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the name of a file that cannot be removed: it is protected, or another machine has it open."""
    unlink = os.unlink

    def refuse(path: str, **words: int | None) -> None:
        if Path(path).name == "held":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        unlink(path, **words)

    monkeypatch.setattr(os, "unlink", refuse)
    return "held"


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(
    tmp_path: Path, protected: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(10, writers=writes(protected, b"x"), meta={})
    for step in (20, 30, 40):
        store.write(step, writers=writes("w", b"x"), meta={})
        assert newest(store).name == f"step_{step:08d}"
        assert [folder.name for folder in unremoved(tmp_path)] == [".step_00000010.removed"]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and ".step_00000010.removed" in warnings[0] and protected in warnings[0]


def test_a_stale_folder_that_cannot_be_removed_does_not_block_its_step(tmp_path: Path, protected: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    for _ in range(2):  # two processes were killed while they wrote this step
        (tmp_path / ".step_00000010.partial").mkdir()
        (tmp_path / ".step_00000010.partial" / protected).touch()
        store.write(10, writers=writes("w", b"x"), meta={})
        assert newest(store).name == "step_00000010"
    assert len(unremoved(tmp_path)) == 2


def test_a_folder_that_cannot_be_renamed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(OSError(errno.EBUSY, "busy")))
        remove_folder(tmp_path / "old")
    assert names(tmp_path) == ["old"]
    remove_folder(tmp_path / "old")
    assert names(tmp_path) == []


def test_without_replace_a_folder_with_files_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with atomic_folder(tmp_path / "out", replace=False) as folder:  # an existing empty folder is filled
        (folder / "model").touch()
    assert names(tmp_path / "out") == ["model"]
    with pytest.raises(OSError, match="was not written"), atomic_folder(tmp_path / "out", replace=False) as folder:
        (folder / "other").touch()
    assert names(tmp_path / "out") == ["model"] and names(tmp_path) == ["out"]
