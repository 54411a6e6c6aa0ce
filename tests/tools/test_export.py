"""Which paths `relax export` refuses to write to, before it touches anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.tools import export


@pytest.mark.parametrize("kind", ["files", "file", "link", "dangling", "here", "run", "checkpoints", "checkpoint"])
def test_an_out_that_is_taken_is_refused_and_nothing_is_touched(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = Path("run/checkpoints/step_00000004")
    (tmp_path / checkpoint).mkdir(parents=True)
    (tmp_path / checkpoint / "meta.json").write_text("{}")
    (tmp_path / "files").mkdir()
    (tmp_path / "files/notes.txt").write_text("precious")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nowhere")
    out = {"here": ".", "run": "run", "checkpoints": "run/checkpoints", "checkpoint": str(checkpoint)}.get(kind, kind)
    before = sorted(tmp_path.rglob("*"))
    assert export.main([str(checkpoint), out]) == 2
    assert f"{Path(out)}: OUT must be a new or an empty folder" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "link").is_symlink()
    assert (tmp_path / "files/notes.txt").read_text() == (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("out", ["empty", "new", "new/below"])
def test_a_free_out_is_no_reason_to_refuse(out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert export.main([str(tmp_path / "no_checkpoint"), str(tmp_path / out)]) == 2
    assert "no meta.json there" in capsys.readouterr().err
