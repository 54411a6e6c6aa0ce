"""Tests that a command writes only to new paths: existing files and folders of the user do not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core.contracts.output_path import (
    check_output_file,
    check_output_folder,
    new_private_folder,
    next_free,
)
from relax_core.tools import export as export_tool
from relax_core.train.checkpoints.checkpoint_store import META


def linked(root: Path) -> Path:
    (root / "real").mkdir()
    (root / "link").symlink_to("real")
    return root / "link"


def dangling(root: Path) -> Path:
    (root / "link").symlink_to("nowhere")
    return root / "link"


def file(root: Path) -> Path:
    (root / "file.txt").write_text("precious")
    return root / "file.txt"


def working(root: Path) -> Path:
    (root / "empty").mkdir()
    return Path(".")


def hidden(root: Path) -> Path:
    (root / "out").mkdir()
    (root / "out" / ".notes").write_text("precious")
    return root / "out"


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "folder with a hidden file": (hidden, ".notes"),
    "link to a folder": (linked, "link"),
    "link to nothing": (dangling, "link"),
    "file": (file, "file"),
    "working folder": (working, "working folder"),
}


def tree(root: Path) -> list[tuple[str, bool, bytes]]:
    return sorted(
        (str(path.relative_to(root)), path.is_symlink(), path.read_bytes() if path.is_file() else b"")
        for path in root.rglob("*")
    )


@pytest.mark.parametrize("name", WRONG)
def test_an_output_folder_with_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, keyword = WRONG[name]
    out = make(tmp_path)
    if not out.is_absolute():
        monkeypatch.chdir(tmp_path / "empty")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=rf"OUT={out}.*{keyword}.*does not exist"):
        check_output_folder(out, option="OUT")
    assert tree(tmp_path) == before


def test_a_missing_and_an_empty_folder_are_fine(tmp_path: Path) -> None:
    check_output_folder(tmp_path / "a" / "b", option="OUT")
    (tmp_path / "empty").mkdir()
    check_output_folder(tmp_path / "empty", option="OUT")


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/step_00000004", "checkpoints/step_00000004/.."])
def test_export_keeps_the_run_that_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: str) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / META).write_text("{}")
    before = tree(tmp_path)
    out = tmp_path / "run" / inside
    assert export_tool.main([str(checkpoint), str(out)]) == 2
    printed = capsys.readouterr().err
    assert f"OUT={out}" in printed and "not empty" in printed
    assert tree(tmp_path) == before


def test_an_output_file_that_exists_is_refused(tmp_path: Path) -> None:
    check_output_file(tmp_path / "new.json", option="--out")
    for path in (file(tmp_path), tmp_path, dangling(tmp_path)):
        with pytest.raises(ValueError, match=f"--out {path} exists"):
            check_output_file(path, option="--out")


def test_the_next_free_name_has_a_number(tmp_path: Path) -> None:
    for name in ("trace.json", "trace-2.json", "trace-3.json"):
        assert next_free(tmp_path / "trace.json") == tmp_path / name
        (tmp_path / name).touch()


def test_a_folder_with_files_gets_a_neighbour(tmp_path: Path) -> None:
    made = []
    for _ in range(3):
        made.append(new_private_folder(tmp_path / "out", key="run.dir"))
        (made[-1] / "answers.jsonl").touch()
    assert [folder.name for folder in made] == ["out", "out-2", "out-3"]
    (tmp_path / "empty").mkdir()
    assert new_private_folder(tmp_path / "empty", key="run.dir") == tmp_path / "empty"
