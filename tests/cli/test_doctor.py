"""Tests the findings of `relax doctor` on this machine and on killed runs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from relax_core.cli import doctor
from relax_core.control.host.run_paths import owned

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_run_can_work_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor_command() == 0
    printed = capsys.readouterr().out
    for topic in (
        "python",
        "libraries",
        "cores",
        "memory",
        "shared memory",
        "disk, /tmp",
        "ports",
        "GPU",
        "PNG, WebP, MP4, WAV, MP3, MP4 with sound are decoded",
    ):
        assert topic in printed
    assert "A run can work here." in printed


def test_too_little_memory_is_bad(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: 1 << 30)
    assert doctor.doctor_command() == 1
    printed = capsys.readouterr().out
    assert "BAD   memory" in printed and "Close other programs" in printed


def test_a_missing_library_is_bad(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    missing = doctor.LibraryVersion(name="ray", found=None, tested="2.60.0")
    present = doctor.LibraryVersion(name="torch", found="2.14.0", tested="2.13.0")
    monkeypatch.setattr(doctor, "versions", lambda: [missing, present])
    assert doctor.doctor_command() == 1
    printed = capsys.readouterr().out
    assert "ray is missing" in printed
    assert "torch 2.14.0, tested with 2.13.0" in printed


def test_a_missing_decoder_is_a_note_and_a_broken_one_is_bad(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "find_spec", lambda name: None if name == "av" else object())
        assert doctor.doctor_command() == 0
    assert "note  media          PyAV missing. " in capsys.readouterr().out
    (tmp_path / "av.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.doctor_command() == 1
    assert "BAD   media          media cannot be decoded: " in capsys.readouterr().out


def test_optional_packages_and_data_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"pylatexenc", "if-verifiable", "gymnasium", "mcp"}
    monkeypatch.setattr(doctor, "_is_installed", there.__contains__)
    monkeypatch.setattr(doctor, "_has_nltk_data", lambda name: name != "punkt")
    words = [finding.message for finding in doctor._optional()]
    assert "reasoning-gym is missing. Only data=reasoning_gym with its reward needs it: pip install" in words[0]
    assert "textarena is missing. Only env=textarena needs it: pip install 'relax-core[envs]'" in words[1]
    assert "data of nltk is missing: punkt. Only some instructions of reward=ifeval" in words[2]
    assert words[3:] == ["pylatexenc, if-verifiable, gymnasium, mcp there"]


def test_versions_are_those_of_the_constraints() -> None:
    found = {version.name: version for version in doctor.versions()}
    assert {"torch", "ray", "hydra-core", "megatron-core"} <= set(found)
    assert found["torch"].found is not None and found["torch"].tested is not None


def test_what_a_dead_run_left_is_told_and_cleaned(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="rlx-"))
    with owned(folder, "the run in /runs/one"):
        doctor.doctor_command(clean=True)
    assert folder.exists() and "/runs/one" not in capsys.readouterr().out
    doctor.doctor_command()
    assert f"{folder} of the run in /runs/one, which was killed" in capsys.readouterr().out
    doctor.doctor_command(clean=True)
    assert f"removed {folder} of the run in /runs/one" in capsys.readouterr().out
    assert not folder.exists()


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from relax_core.__main__ import main; main(['doctor']); main(['list']); "
        "heavy = ('torch', 'ray', 'transformers', 'av', 'PIL'); "
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.stderr.strip().splitlines()[-1] == "[]", done.stderr
