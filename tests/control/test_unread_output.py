"""Tests that output without a reader does not change a supervised run. Does not start Ray."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.control import supervised_cases
from tests.control.supervised_cases import DEADLINE_S, controller_of, start


def test_ctrl_c_takes_the_reader_first(tmp_path: Path) -> None:
    """In ``… 2>&1 | tee log`` all processes of the foreground group receive the SIGINT, and tee exits at once."""
    process = start(tmp_path, supervised_cases.trains_until_stopped, stderr=subprocess.STDOUT)
    controller_of(tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    assert (tmp_path / "checkpoint").exists()


def test_a_reader_that_stops_reading_blocks_no_process(tmp_path: Path) -> None:
    """A pager stops reading, or a terminal after Ctrl-S."""
    process = start(tmp_path, supervised_cases.trains_until_stopped)
    controller_of(tmp_path)
    process.terminate()
    assert process.wait(DEADLINE_S) == 143
    assert (tmp_path / "checkpoint").exists()
    out, err = process.communicate(timeout=DEADLINE_S)
    assert out.startswith("a long farewell ") and err.startswith("a long farewell "), "what the pipes hold is there"


def test_a_controller_that_dies_while_nobody_reads_is_repeated(tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.killed_once_unread)
    controller_of(tmp_path)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    (tmp_path / "unread").touch()
    assert process.wait(DEADLINE_S) == 7
    assert (tmp_path / "second").exists()


def test_a_terminal_that_closes_stops_the_run_in_order(tmp_path: Path) -> None:
    """The kernel sends SIGHUP to the terminal's foreground processes. From then on, writing to the terminal fails."""
    ours, its = os.openpty()
    process = start(
        tmp_path, supervised_cases.trains_until_stopped, stdin=its, stdout=its, stderr=its, preexec_fn=_take_terminal
    )
    os.close(its)
    controller_of(tmp_path)
    os.close(ours)
    assert process.wait(DEADLINE_S) == 129
    assert (tmp_path / "checkpoint").exists()


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_start_with_closed_streams_works(closed: tuple[int, ...], tmp_path: Path) -> None:
    process = start(tmp_path, supervised_cases.returns_3, preexec_fn=_closes(closed))
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3
    assert out == ("" if 1 in closed else "printed\nechoed\n")
    assert err == ("" if 2 in closed else "printed\n")
    assert (tmp_path / "own").read_text() == "own"


def _closes(descriptors: tuple[int, ...]) -> Callable[[], None]:
    def close() -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    return close
