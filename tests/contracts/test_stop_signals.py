"""Tests how a process with user code handles stop signals. Each case runs in a separate process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, subprocess, sys, threading
from relax_core.contracts.stop_signals import STOP_SIGNALS, ignore_stop_signals

signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # as all processes of a run inherit it
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("Ray's own handler ends the process"))
codes = []

def run():
    ignore_stop_signals()
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)
        with subprocess.Popen(["sleep", "600"]) as child:
            child.send_signal(number)
            codes.append(child.wait(100))

thread = threading.Thread(target=run)
thread.start()
thread.join()
print(codes == [-number for number in STOP_SIGNALS])
"""


def test_they_pass_it_by_and_what_it_starts_can_be_ended_by_them() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
