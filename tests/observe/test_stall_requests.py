"""Tests a command that requests a stall report from a controller: it gets the report, or an error with the reason."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relax_core.cli import stall_command
from relax_core.control.host.run_paths import run_lock
from relax_core.observe.stall_requests import FOLDER, FORGOTTEN_S, NoAnswer, StallRequests, request_report

DEADLINE_S = 60.0


@contextmanager
def controller(run_dir: Path, text: str) -> Iterator[None]:
    """Runs a controller that answers requests until the block ends."""
    asks, ended = StallRequests(run_dir), threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            asks.check(lambda: text)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(DEADLINE_S)


def test_several_commands_get_the_report_and_leave_nothing(tmp_path: Path) -> None:
    answers: list[str] = []

    def ask() -> None:
        answers.append(request_report(tmp_path, timeout_s=DEADLINE_S, goes_on=lambda: True))

    with controller(tmp_path, "the report\n"):
        commands = [threading.Thread(target=ask) for _ in range(3)]
        for command in commands:
            command.start()
        for command in commands:
            command.join(DEADLINE_S)
    assert answers == ["the report\n"] * 3
    assert not list((tmp_path / FOLDER).iterdir())


def test_nobody_answers_in_time_or_the_run_ends(tmp_path: Path) -> None:
    with pytest.raises(NoAnswer, match=r"did not answer within 0\.05 s"):
        request_report(tmp_path, timeout_s=0.05, goes_on=lambda: True)
    with pytest.raises(NoAnswer, match="has just ended"):
        request_report(tmp_path, timeout_s=DEADLINE_S, goes_on=lambda: False)
    assert not list((tmp_path / FOLDER).iterdir()), "a request without a waiting command is withdrawn"


def test_old_asks_and_other_files_get_no_answer(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    old, outside, link = folder / f"{'0' * 32}.ask", folder / "..%2f.ask", folder / f"{'1' * 32}.ask"
    for file in (old, outside):
        file.write_text("")
    link.symlink_to("/nowhere")
    os.utime(old, (0.0, time.time() - 2 * FORGOTTEN_S))
    asks = StallRequests(tmp_path)
    asks.check(lambda: pytest.fail("nobody waits for a report"))
    assert asks._thread is not None
    asks._thread.join(DEADLINE_S)
    assert sorted(folder.iterdir()) == sorted([outside, link])


def test_a_requester_that_leaves_is_left_without_a_report_and_the_others_get_theirs(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    leaves, stays = folder / f"{'0' * 32}.ask", folder / f"{'1' * 32}.ask"
    for file in (leaves, stays):
        file.write_text("")
    asks = StallRequests(tmp_path)

    def report() -> str:
        leaves.unlink()
        return "the report"

    asks.check(report)
    assert asks._thread is not None
    asks._thread.join(DEADLINE_S)
    assert list(folder.iterdir()) == [stays.with_suffix(".txt")]


def test_the_command_prints_the_report_of_a_run_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("name: demo\n")
    with run_lock(tmp_path):
        with controller(tmp_path, "actor-0 waits for bus\n"):
            assert stall_command.main([str(tmp_path)]) == 0
        assert capsys.readouterr().out == "actor-0 waits for bus\n"
        assert stall_command.main([str(tmp_path), "--timeout=0.05"]) == 1
        assert "its controller did not answer within 0.05 s" in capsys.readouterr().err


def test_the_command_says_that_a_run_has_ended_or_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stall_command.main([str(tmp_path)]) == 2
    assert "is not a folder of a run" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "summary.json").write_text('{"outcome":"finished"}')
    assert stall_command.main([str(tmp_path)]) == 1
    assert "(finished)" in capsys.readouterr().err
    assert not (tmp_path / FOLDER).exists()
