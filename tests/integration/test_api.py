"""Tests whole runs by `relax_core.run`: the examples of docs/api.md, a thread without a terminal, external stops."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import relax_core

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
MARK = "RELAX_TEST_RUN"
SHORT = ["eval.every=0", "run.export_hf=false"]

INTERRUPTED = """
import os, signal, sys
import relax_core

words = ["run.steps=100000", "eval.every=0", "run.export_hf=false", f"run.dir={sys.argv[1]}"]


def interrupt(step, numbers):
    os.kill(os.getpid(), signal.SIGINT)


try:
    relax_core.run(words, on_step=interrupt)
except KeyboardInterrupt:
    stopped = relax_core.load_run(sys.argv[1]).summary
    print("interrupted", stopped.outcome, stopped.steps, flush=True)


def fail(step, numbers):
    assert step >= stopped.steps, "steps of the earlier run are not told again"
    raise LookupError(f"of step {step}")


try:
    relax_core.run([*words, "resume=auto"], on_step=fail)
except LookupError as error:
    summary = relax_core.load_run(sys.argv[1]).summary
    print("raised", error, summary.outcome, summary.steps > stopped.steps)
"""


def marked(mark: str) -> list[int]:
    """Returns the processes with the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def finished(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end and checks that its runs leave nothing behind."""
    mark = secrets.token_hex(8)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), MARK: mark},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert marked(mark) == []
    return done


def test_the_documents_examples_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    first, errors, left = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    short = first.replace('"run.steps=20"', '"run.steps=4", "eval.every=2", "eval.rows=16"')
    assert short != first
    done = finished(f"{short}\n{errors}\n{left}", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^step (\d): reward 0\.", done.stdout, re.MULTILINE) == list("0123")
    assert re.search(r"^finished 4 0\.\d+ .*/runs/tiny_qwen3-reverse_digits/", done.stdout, re.MULTILINE)
    assert "['optimizer.lr=-1.0" in done.stdout
    curve, trained, _, seconds = done.stdout.splitlines()[-1].split()
    assert (curve, trained) == ("4", "128") and float(seconds) > 0


def test_a_thread_runs_a_lambda_and_stops_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a notebook, sys.stdout is not a terminal and not descriptor 1."""
    told: list[int] = []
    found: list[object] = []
    share = 0.5

    def on_step(step: int, numbers: object) -> bool:
        told.append(step)
        return len(told) >= 3

    def call() -> None:
        overrides = ["run.steps=100000", *SHORT, f"run.dir={tmp_path / 'run'}"]
        found.append(relax_core.run(overrides, reward=lambda given: share, on_step=on_step))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(600)
    (summary,) = found
    assert isinstance(summary, relax_core.Summary)
    assert summary.outcome == "stopped" and 3 <= summary.steps < 100000
    assert told == list(range(len(told))) and len(told) <= summary.steps
    assert summary["reward"]["last"] == 0.5
    assert "stopped after" in capsys.readouterr().out
    run = relax_core.load_run(tmp_path / "run")
    assert len([row for row in run.curves() if "actor/reward" in row]) == summary.steps
    assert sum(row["state"] == "trained" for row in run.samples()) == summary["ledger"]["trained"]
    assert {row["reward"] for row in run.samples(step=0)} == {0.5}


def test_an_interrupt_and_an_exception_end_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    done = finished(INTERRUPTED, str(tmp_path / "run"), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^interrupted stopped [1-9]", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^raised of step \d+ stopped True$", done.stdout, re.MULTILINE), done.stdout
