"""`relax doctor`: what it finds on this machine, and what it finds of dead runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_core.cli import doctor, leftovers, versions

REPOSITORY = Path(__file__).resolve().parents[2]


def dead_pid() -> int:
    """Of a process that has ended and was waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def old_folder(path: Path) -> Path:
    path.mkdir()
    os.utime(path, (0, 0))
    return path


def test_a_run_can_work_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor_command() == 0
    told = capsys.readouterr().out
    for topic in ("python", "libraries", "cores", "memory", "shared memory", "disk, /tmp", "ports", "GPU"):
        assert topic in told
    assert "A run can work here." in told


def test_too_little_memory_is_bad(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: 1 << 30)
    assert doctor.doctor_command() == 1
    told = capsys.readouterr().out
    assert "BAD   memory" in told and "Close other programs" in told


def test_a_missing_library_is_bad(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    missing = versions.LibraryVersion(name="ray", found=None, tested="2.60.0")
    other = versions.LibraryVersion(name="torch", found="2.14.0", tested="2.13.0")
    monkeypatch.setattr(doctor, "versions", lambda: [missing, other])
    assert doctor.doctor_command() == 1
    told = capsys.readouterr().out
    assert "ray is missing" in told
    assert "torch 2.14.0, tested with 2.13.0" in told


def test_versions_are_those_of_the_constraints() -> None:
    found = {one.name: one for one in versions.versions()}
    assert {"torch", "ray", "hydra-core", "megatron-core"} <= set(found)
    assert found["torch"].found is not None and found["torch"].tested is not None


def test_what_dead_runs_left_is_found_and_what_lives_is_not(tmp_path: Path) -> None:
    temporary, shared = tmp_path / "tmp", tmp_path / "shm"
    temporary.mkdir()
    shared.mkdir()
    dead, held, fresh = old_folder(temporary / "rlx-dead"), old_folder(temporary / "rlx-held"), temporary / "rlx-fresh"
    fresh.mkdir()
    old_folder(shared / f"relax-{dead_pid()}-abcd")
    old_folder(shared / f"relax-{os.getpid()}-abcd")
    with subprocess.Popen([sys.executable, "-c", "input()", str(held)], stdin=subprocess.PIPE) as holder:
        found = leftovers.leftovers(temporary=temporary, shared_memory=shared)
        holder.communicate(b"\n")
    removals = [one.removal for one in found if str(tmp_path) in one.removal]
    assert len(removals) == 2
    assert removals[0] == f"rm -r {dead}"
    assert removals[1].startswith(f"rm -r {shared}/relax-")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from relax_core.__main__ import main; main(['doctor']); main(['list']);"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip().splitlines()[-1] == "[]", done.stderr
