"""Python processes of Relax import Python's own modules, and the line that says why one failed is found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import relax_core
from relax_core.contracts.python_child import cause_in, cause_in_log, import_path, module_command

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shadows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with modules that have names of Python's own."""
    for name in ("types", "random", "math", "statistics", "ray"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the working folder')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_child_takes_no_module_of_the_working_folder_for_python_s_own(shadows: Path) -> None:
    done = subprocess.run(module_command("relax_core", "--version"), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("relax "), done.stderr


def test_a_child_looks_first_into_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), "a"])
    assert "-P" not in module_command("relax_core")
    monkeypatch.setattr(sys, "path", [str(ROOT), "a", str(ROOT)])  # as with `pip install -e`
    assert "-P" in module_command("relax_core")


@pytest.mark.parametrize("before", [True, False])
def test_python_m_looks_into_the_working_folder_last(
    shadows: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    folder = str(shadows)
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(sys, "path", [folder, "a", "b"] if before else ["a", "b"])
    relax_core._put_working_folder_last()
    assert sys.path == ["a", "b", folder]
    assert import_path().split(":")[1:] == ["a", "b"]
    monkeypatch.setattr(sys, "argv", ["script.py"])
    monkeypatch.setattr(sys, "path", [folder, "a"])
    relax_core._put_working_folder_last()
    assert sys.path == [folder, "a"]


def test_all_modules_of_relax_are_started_alike() -> None:
    files = [file for name in ("relax_core", "launchers", "envs", "rewards") for file in (ROOT / name).rglob("*.py")]
    assert not [file for file in files if re.search(r'sys\.executable,\s*"-m"', file.read_text())]


TRACEBACK = """warming up
Traceback (most recent call last):
  File "agent.py", line 1, in <module>
    from openai import OpenAI
ModuleNotFoundError: No module named 'openai'
"""


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (TRACEBACK, "ModuleNotFoundError: No module named 'openai'"),
        (f"{TRACEBACK}\n\n", "ModuleNotFoundError: No module named 'openai'"),
        (TRACEBACK.encode() + b"\xff", "�"),
        (
            "  File 'a.py', line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed",
            "SyntaxError: '(' was never",
        ),
        ("Traceback (most recent call last):\n  File 'a.py', line 1\nKeyError: 'a\n  b'", "KeyError: 'a"),
        ("bad config", "bad config"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        ("", ""),
    ],
)
def test_the_line_that_says_why_a_process_failed_is_found(output: str | bytes, cause: str) -> None:
    assert cause_in(output).startswith(cause) and bool(cause_in(output)) == bool(cause)


def test_a_log_is_read_behind_what_it_had_before(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert cause_in_log(log) == ""
    log.write_text("ValueError: old\n")
    size = log.stat().st_size
    assert (cause_in_log(log), cause_in_log(log, after=size)) == ("ValueError: old", "")
