"""Tests stops by signals: to one process or to all, early, and twice. Does not start Ray."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from relax_core.contracts.stop_signals import STOP_SIGNALS
from relax_core.control.controller_process import AGAIN_S, StopSignals
from tests.control import supervised_cases
from tests.control.supervised_cases import DEADLINE_S, controller_of, start, wait_for


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_is_one_stop(number: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.trains_until_stopped)
    controller = controller_of(tmp_path)
    for pid in (controller, process.pid, controller):
        os.kill(pid, number)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + number, err
    assert (tmp_path / "checkpoint").exists()


def test_a_hang_up_passes_a_run_by_that_was_started_with_nohup(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.trains_until_stopped, preexec_fn=_no_hang_up)
    controller_of(tmp_path)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)  # two pending signals are delivered in the order of their numbers
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM, err


def _no_hang_up() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_before_a_train_step_is_done_a_stop_ends_everything_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.has_not_trained)
    controller = psutil.Process(controller_of(tmp_path))
    below = [controller, *controller.children()]
    process.terminate()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "stopped before a train step was done" in err
    assert len(below) == 2 and not any(child.is_running() for child in below)


def test_a_train_step_that_is_reported_after_the_stop_has_its_checkpoint(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.reports_its_step_after_the_stop)
    controller_of(tmp_path)
    process.terminate()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM and "before a train step" not in err, err
    assert (tmp_path / "checkpoint").exists()


def stop_twice(folder: Path, case: supervised_cases.Case) -> tuple[int, str, str]:
    """Sends a signal. After its receipt sends a second signal, late enough to count as another stop."""
    process = start(folder, case)
    controller_of(folder)
    process.send_signal(signal.SIGINT)
    wait_for((folder / "heard").exists)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5 * AGAIN_S)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def test_another_signal_interrupts_the_controller(tmp_path: Path) -> None:
    code, out, _ = stop_twice(tmp_path, supervised_cases.ends_when_interrupted)
    assert (code, out) == (99, "interrupted\n")


def test_a_controller_that_is_not_interrupted_is_killed(tmp_path: Path) -> None:
    code, _, err = stop_twice(tmp_path, supervised_cases.ends_never)
    assert code == 128 + signal.SIGINT
    assert "ended at once, without a checkpoint" in err


def test_a_controller_that_dies_of_the_stop_is_not_repeated(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.dies_when_stopped)
    controller_of(tmp_path)
    process.terminate()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "killed by SIGKILL, while the run was being stopped" in err


# -- The states of workers, and what ends an attempt ------------------------------------------------------------------


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_asks_and_a_later_one_ends(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(stop_signal) for stop_signal in STOP_SIGNALS]
    monkeypatch.setattr("relax_core.control.controller_process.AGAIN_S", 3600.0)
    with StopSignals() as signals:
        assert signals.received is None
        signal.raise_signal(number)
        assert signals.received == number and signals.exit_code == 128 + number
        signal.raise_signal(signal.SIGTERM)  # this signal counts as the same stop
        assert not signals.again
        monkeypatch.setattr("relax_core.control.controller_process.AGAIN_S", -1.0)
        signal.raise_signal(signal.SIGTERM)
        assert signals.again and signals.received == number
    assert [signal.getsignal(stop_signal) for stop_signal in STOP_SIGNALS] == before


def test_another_signal_is_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert seen == [signal.SIGUSR1] and signals.received is None
    finally:
        signal.signal(signal.SIGUSR1, before)
