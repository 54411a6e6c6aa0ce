"""Tests that one sender at a time changes a server's weights, and that a killed sender delays no other sender."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from relax_core.contracts.engine import EngineError, EngineUnreachable
from relax_core.engines.sglang.sglang_weight_calls import SenderLock

URL = "http://127.0.0.1:30000"
HOLDER = """
import sys, time
from pathlib import Path
from relax_core.engines.sglang.sglang_weight_calls import SenderLock
lock = SenderLock(sys.argv[1], timeout_s=1.0)
lock.take(Path(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


def test_senders_take_turns(tmp_path: Path) -> None:
    inside, most = [0], [0]

    def send() -> None:
        lock = SenderLock(URL, timeout_s=20.0)
        for _ in range(5):
            lock.take(tmp_path)
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.002)
            inside[0] -= 1
            lock.give_back()

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert most == [1]


def test_a_holder_that_is_stopped_is_waited_for_until_the_deadline_and_one_that_was_killed_is_not(
    tmp_path: Path,
) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, URL, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            with pytest.raises(EngineUnreachable, match=r"another sender has been sending weights for 0 s"):
                SenderLock(URL, timeout_s=0.2).take(tmp_path)
            other_lock = SenderLock("http://127.0.0.1:30001", timeout_s=0.0)
            other_lock.take(tmp_path)
            other_lock.give_back()
        finally:
            holder.kill()
    mine = SenderLock(URL, timeout_s=0.2)
    mine.take(tmp_path)
    mine.take(tmp_path)  # after an interrupted update, a sender takes the lock again
    mine.give_back()


def test_a_folder_that_is_gone_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="weights cannot be sent"):
        SenderLock(URL, timeout_s=1.0).take(tmp_path / "gone")
