"""Tests child processes: their modules, their first message, the cause of a failure, the end of the process tree."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import relax_core
from relax_core.contracts.child_process import (
    Child,
    ChildLost,
    Limit,
    LimitedLog,
    cause_in,
    cause_in_log,
    import_path,
    module_command,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shadows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a working folder with modules that have names of Python's modules."""
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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Yields a function that starts a program from its source text. The processes end with the test."""
    started: list[Child] = []

    def start_child(program: str, **options: Any) -> Child:
        command = [sys.executable, "-I", "-S", "-c", program]
        started.append(Child(command, name="the helper", log=tmp_path / "helper.log", **options))
        return started[-1]

    yield start_child
    for child in started:
        child.end(grace_s=0.0)


def test_a_child_is_asked_for_its_first_lines_without_waiting(start: Any) -> None:
    child = start("input(); print('a', flush=True); print('b', flush=True)")
    assert child.first_line(wait_s=0.0) is None
    child.send(b"\n")
    assert [child.first_line(), child.first_line()] == [b"a", b"b"]
    assert child.wait(60.0) == 0


@pytest.mark.parametrize(
    ("program", "options", "message", "code"),
    [
        ("raise SystemExit('no such model')", {}, "its process died (exit code 1): no such model; see ", 1),
        ("import os; os.kill(os.getpid(), 9)", {}, "its process died (signal SIGKILL); see ", -9),
        ("input()", {"start": Limit(0.2, "a.start_s")}, "gave no answer within a.start_s=0.2 s; see ", None),
    ],
)
def test_a_child_that_gives_no_first_answer_is_named_with_the_limit_and_the_cause(
    start: Any, program: str, options: dict[str, Any], message: str, code: int | None
) -> None:
    child = start(program, **options)
    with pytest.raises(ChildLost) as lost:
        child.first_line()
    assert str(lost.value).startswith("the helper did not start: ") and message in str(lost.value)
    assert (lost.value.code, lost.value.late) == (code, code is None)


FORKS = "import os, time\nif not os.fork(): os.setsid()\nprint(os.getpid(), flush=True)\ntime.sleep(600)"


def test_the_end_of_a_child_ends_its_children(start: Any) -> None:
    child = start(FORKS)
    below = [psutil.Process(int(child.first_line())) for _ in range(2)]
    assert not child.end(grace_s=0.0) and child.poll() == -signal.SIGKILL
    _await_end(below)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_ends_with_its_parent_and_ignores_the_signals_that_it_shall(
    start: Any, number: signal.Signals
) -> None:
    program = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import site; site.main()
from relax_core.contracts.child_process import Child, signal
child = Child(["sleep", "600"], name="sleep", with_parent=signal.Signals({int(number)}), ignored=[signal.SIGUSR1])
print(child.pid, flush=True)
time.sleep(600)
"""
    owner = start(program)
    sleeps = psutil.Process(int(owner.first_line()))
    deadline = time.monotonic() + 60.0
    while sleeps.name() != "sleep" and time.monotonic() < deadline:
        time.sleep(0.01)
    sleeps.send_signal(signal.SIGUSR1)
    assert sleeps.is_running()
    owner.send_signal(signal.SIGKILL)
    _await_end([sleeps])


def _await_end(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 60.0
    while left := [
        process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_output_that_cannot_be_written_holds_up_nobody_and_the_log_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wait_until: Callable[..., None]
) -> None:
    path = tmp_path / "folder" / "log"  # the folder is missing, so each write fails
    output = LimitedLog(path, max_bytes=10)
    for _ in range(3):  # more than a pipe holds
        os.write(output.descriptor, b"x" * (1 << 16))
    path.parent.mkdir()
    wait_until(lambda: os.write(output.descriptor, b"y") and path.exists(), what="output after the failure")
    output.close()
    assert len([record for record in caplog.records if str(path) in record.getMessage()]) == 1
