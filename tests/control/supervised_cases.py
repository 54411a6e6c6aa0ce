"""Runs a real supervisor. Its controllers run a test case: ``python -m tests.control.supervised_cases FOLDER CASE``."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_core.config.compose import load_config
from relax_core.config.reward_choice import RewardChoice
from relax_core.config.schema import RelaxConfig
from relax_core.control import controller_process
from relax_core.control.controller_process import SupervisorPipe
from relax_core.control.host.run_paths import RunPaths
from relax_core.control.local_run import run_local
from relax_core.control.recoveries import FROM_CHECKPOINT, Recoveries, recoveries_file
from relax_core.control.resume import ResumePoint
from relax_core.control.supervisor import Attempt, supervise
from relax_core.registry import find_reward
from relax_core.rollout.rewards.label_check import LabelCheck
from relax_core.sandbox.worker_sandbox import worker_refusal
from relax_core.server.engine_order_service import EngineOrderService, answering
from relax_core.server.engine_order_store import EngineOrderStore
from relax_core.server.order_types import Limits, RunRow

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
LONG_S = "600"

Case = Callable[[Path, RunPaths, Attempt, SupervisorPipe], int]


# -- the tests' side --------------------------------------------------------------------------------------------------
def start(folder: Path, case: Case, *overrides: str, **how: Any) -> subprocess.Popen[str]:
    """Starts the supervisor in a new session. ``how`` are further arguments of `Popen`."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "tests.control.supervised_cases", str(folder), case.__name__, *overrides]
    return subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **(streams | how))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def controller_of(folder: Path) -> int:
    """Waits until the controller is ready, and returns its process id."""
    ready = folder / "ready"
    wait_for(lambda: ready.exists() and bool(ready.read_text()))
    return int(ready.read_text())


# -- the controllers' side --------------------------------------------------------------------------------------------
def killed_once(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    (folder / f"paths{attempt.number}").write_text(f"{paths.folder}\n{paths.weights_folder}")
    (paths.folder / "left").touch()
    if attempt.number == 0:
        adopted = subprocess.Popen(["sleep", LONG_S], start_new_session=True)
        (folder / "adopted").write_text(str(adopted.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    print(attempt.causes, flush=True)
    return 7


def dies_when_told_and_then_waits(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    message = "first" if attempt.number == 0 else "second"
    assert attempt.gateway is not None
    book = EngineOrderStore(folder)
    book.run = RunRow(at=1.0, step=2, steps=3, stopping=False)
    with answering(attempt.gateway, EngineOrderService(book, Limits(start=1, most=2), None).answer):
        (folder / "ready").write_text(str(os.getpid()))
        wait_for(lambda: (folder / message).exists())
        if attempt.number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return 7


def always_killed(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def exits_once(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    """Exits like Ray's code in a process that has lost Ray's GCS."""
    if attempt.number == 0:
        os._exit(1)
    print(attempt.causes, flush=True)
    return 7


def loses_ray_once(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    if attempt.number == 0:
        supervisor.report_lost("Ray's GCS died, and the controller with it")
        os._exit(1)
    print(attempt.causes, flush=True)
    return 7


def lacks_descriptors_once(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    """Executes a real run. The first attempt has no free file descriptor."""
    print(attempt.causes, flush=True)
    if attempt.number:
        return 7
    config = load_config([f"run.dir={folder / 'run'}", "run.steps=1"])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
    return run_local(config, None, paths, attempt, supervisor)


def third_ray_starts(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    with (folder / "starts").open("a") as starts:
        starts.write(".")
    if (folder / "starts").stat().st_size == 3:
        print(f"attempt {attempt.number}", flush=True)
        return 7
    supervisor.report_ray_unstarted("Ray did not start.")
    return 1


def no_ray_starts(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    supervisor.report_ray_unstarted("Ray did not start.")
    return 1


def killed_after_two_recoveries(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    recoveries = Recoveries(recoveries_file(folder), report=print)
    for step in range(2):
        recoveries.begin(FROM_CHECKPOINT, "the bus died", at_step=step, from_step=0)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def frozen_once(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    if attempt.number == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return 0


def fails(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    raise RuntimeError("no such luck")


def returns_3(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    (folder / "ready").write_text(str(os.getpid()))
    with (folder / "own").open("w") as own:  # otherwise the closed stream's descriptor would be reused
        print("printed", flush=True)
        print("printed", file=sys.stderr, flush=True)
        subprocess.run(["echo", "echoed"], check=True)
        own.write("own")
    return 3


def trains_until_stopped(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    supervisor.report_trained()
    code = _await_stop(folder, supervisor)
    for _ in range(1000):  # more than fits into a pipe's buffer
        print("a long farewell " * 10)
        print("a long farewell " * 10, file=sys.stderr)
    (folder / "checkpoint").touch()
    return code


def reports_its_step_after_the_stop(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    supervisor.watch_steps()
    code = _await_stop(folder, supervisor)
    supervisor.report_trained()
    (folder / "checkpoint").touch()
    return code


def has_not_trained(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    subprocess.Popen(["sleep", LONG_S], start_new_session=True)
    _await_stop(folder, supervisor)
    _await(folder / "never")
    return 0


def ends_when_interrupted(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    supervisor.report_trained()
    _await_stop(folder, supervisor)
    try:
        (folder / "heard").touch()
        _await(folder / "never")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 99
    return 0


def ends_never(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    supervisor.report_trained()
    _await_stop(folder, supervisor)
    while True:
        try:
            (folder / "heard").touch()
            _await(folder / "never")
        except KeyboardInterrupt:
            continue


def dies_when_stopped(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    supervisor.report_trained()
    _await_stop(folder, supervisor)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def killed_once_unread(folder: Path, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe) -> int:
    """Kills itself when the output of the supervisor has no reader."""
    if attempt.number == 0:
        (folder / "ready").write_text(str(os.getpid()))
        _await(folder / "unread")
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "second").touch()
    return 7


def _await(file: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def _await_stop(folder: Path, supervisor: SupervisorPipe) -> int:
    """Waits for the stop and returns the exit code of its signal."""
    (folder / "ready").write_text(str(os.getpid()))
    deadline = time.monotonic() + DEADLINE_S
    while supervisor.stop_signal is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert supervisor.stop_signal is not None
    return 128 + supervisor.stop_signal


def main() -> int:
    folder, case = Path(sys.argv[1]), globals()[sys.argv[2]]
    if case is ends_never:
        controller_process.IMMEDIATE_END_S = 0.0

    def run_once(
        config: RelaxConfig, resume: ResumePoint | None, paths: RunPaths, attempt: Attempt, supervisor: SupervisorPipe
    ) -> int:
        return int(case(folder, paths, attempt, supervisor))

    config = load_config([f"run.dir={folder}", "run.max_recoveries=2", *sys.argv[3:]])
    assert "ray" not in sys.modules and "torch" not in sys.modules
    if case is killed_once and not worker_refusal():  # the check of labels starts an isolated reward in the sandbox
        reward = find_reward("math")
        check = LabelCheck(RewardChoice(reward, reward.config(name="math")))
        check.add({"answer": "\\frac{1}{7}"}, "row 0")
        assert check.describe() == []
    return supervise(config, None, run_once)


if __name__ == "__main__":
    sys.exit(main())
