"""Tests that forked and executed Ray workers equal Ray's own workers, and that Ray starts workers with preparations."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private import workers

from relax_core.control.host.worker_start import FORK_SERVER, worker_command

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0
START = ROOT / "relax_core" / "control" / "host" / "worker_start.py"
WORKER = """
import json, os, random, signal, sys, threading
import numpy as np
report = {
    "argv": sys.argv, "name": __name__, "folder": os.getcwd(), "variable": os.environ.get("A_VARIABLE"),
    "home": os.environ.get("HOME"), "path": sys.path[0], "pid": os.getpid(), "parent": os.getppid(),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "default": [
        signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    ],
    "loaded": "fractions" in sys.modules, "drawn": [random.random(), float(np.random.rand())],
    "oom_score_adj": open("/proc/self/oom_score_adj").read(),
    "read": sys.stdin.read(), "descriptors": len(os.listdir("/proc/self/fd")),
    "own group": os.getpgrp() == os.getpid(),
}
print(json.dumps(report), flush=True)
print("an error", file=sys.stderr, flush=True)
"""


@contextmanager
def fork_server(folder: Path, *modules: str) -> Iterator[subprocess.Popen[bytes]]:
    server = subprocess.Popen(
        [sys.executable, "-m", "relax_core.control.host.fork_server", str(folder / "socket"), *modules],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (folder / "socket").exists():
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.01)
        yield server
    finally:
        with server:
            server.kill()


def start_worker(folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Starts a worker like the raylet. The worker's streams are pipes."""
    worker = folder / "worker.py"
    worker.write_text(WORKER, encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, str(START), str(worker), "--an=option", "--language=PYTHON"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={"PATH": os.environ["PATH"], FORK_SERVER: str(folder / "socket"), **variables},
        preexec_fn=_as_the_raylet,
    )


def _as_the_raylet() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    Path("/proc/self/oom_score_adj").write_text("700")


def report_of(worker: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, errors = worker.communicate("some words", timeout=DEADLINE_S)
    report: dict[str, Any] = json.loads(out)
    return report, errors


def test_a_forked_worker_is_like_an_executed_one(tmp_path: Path) -> None:
    with fork_server(tmp_path, "numpy", "fractions") as server:
        forked, errors = report_of(start_worker(tmp_path, A_VARIABLE="a value"))
        assert forked.pop("parent") == server.pid and errors == "an error\n"
    executed, errors = report_of(start_worker(tmp_path, A_VARIABLE="a value"))
    assert "does not answer" in errors and errors.endswith("an error\n")
    executed.pop("parent")
    assert forked.pop("loaded") and not executed.pop("loaded")
    assert forked.pop("own group"), "Ray kills the process group of a worker that has ended"
    executed.pop("own group")
    for report in (forked, executed):
        assert report.pop("pid") and report.pop("drawn")
    assert forked == executed
    assert forked["argv"] == [str(tmp_path / "worker.py"), "--an=option"] and forked["name"] == "__main__"
    assert (forked["variable"], forked["home"], forked["read"]) == ("a value", None, "some words")
    assert forked["oom_score_adj"] == "700\n"
    assert forked["blocked"] == [signal.SIGUSR1] and forked["default"] == [True, True]


def test_workers_draw_other_random_numbers_and_are_waited_for(tmp_path: Path) -> None:
    with fork_server(tmp_path, "numpy", "random") as server:
        workers = [start_worker(tmp_path) for _ in range(3)]
        reports = [report_of(worker)[0] for worker in workers]
        assert len({number for report in reports for number in report["drawn"]}) == 6
        deadline = time.monotonic() + DEADLINE_S
        while psutil.Process(server.pid).children():  # includes exited children that were not reaped
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_it_ends_with_its_owner_and_the_workers_stay(tmp_path: Path) -> None:
    with fork_server(tmp_path, "numpy") as server:
        worker = start_worker(tmp_path)
        assert worker.wait(DEADLINE_S) == 0  # the process that started the worker has ended; the worker reads its stdin
        (own,) = psutil.Process(server.pid).children()
        server.send_signal(signal.SIGTERM)  # every process of a run gets this signal; the owner decides
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(DEADLINE_S) == 0
        assert own.is_running()
        report, _ = report_of(worker)
        assert report["pid"] == own.pid


def test_no_worker_is_forked_from_several_threads(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    server = subprocess.run(
        [sys.executable, "-m", "relax_core.control.host.fork_server", str(tmp_path / "socket"), "threaded"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=DEADLINE_S,
    )
    assert server.returncode == 1 and "2 threads after the imports" in server.stderr
    report, errors = report_of(start_worker(tmp_path))
    assert "does not answer" in errors and report["read"] == "some words"


@pytest.mark.parametrize("socket", ["absent", "a" * 200])
def test_without_a_server_the_worker_is_executed(tmp_path: Path, socket: str) -> None:
    report, errors = report_of(start_worker(tmp_path, **{FORK_SERVER: str(tmp_path / socket)}))
    assert report["read"] == "some words" and "the worker is started without it" in errors


RAY_WORKER = os.path.join(workers.__path__[0], "default_worker.py")
PYTHON, EMPTY = "--language=PYTHON", "--serialized-runtime-env-context={}"


@pytest.mark.parametrize("options", [(PYTHON,), (PYTHON, EMPTY), (EMPTY, PYTHON)])
def test_a_worker_without_an_environment_is_executed_at_once(options: tuple[str, ...]) -> None:
    assert worker_command([RAY_WORKER, "--temp-dir=/a b", *options]) == [RAY_WORKER, "--temp-dir=/a b"]


@pytest.mark.parametrize(
    "options",
    [
        (PYTHON, '--serialized-runtime-env-context={"env_vars": {"A": "1"}}'),
        ("--language=JAVA",),
        (EMPTY, "--language=JAVA"),
        (PYTHON, "--serialized-runtime-env-context", "{}"),
        (),
    ],
)
def test_any_other_worker_is_prepared_by_ray(options: tuple[str, ...]) -> None:
    command = worker_command([RAY_WORKER, *options])
    assert os.path.basename(command[0]) == "setup_worker.py" and os.path.isfile(command[0])
    assert command[1:] == [RAY_WORKER, *options]
