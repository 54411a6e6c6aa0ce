"""Prints which process of a live run waits for which: ``relax stall RUN``.

The report has the same form as the watchdog's report. It lists the activity of each worker, and which worker waits for
which. It shows the stacks of the workers at the end of the trainer's wait chain. The report does not delay train steps.
The exit code is 1 if the run has ended or sends no report in time, and 2 if the run does not exist.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_core.observe.stall_requests import TIMEOUT_S, NoAnswer, request_report
from relax_core.server.run_folders import MARKS, run_state

LIVE = "live"
_NO_REPORT, _NO_RUN = 1, 2


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit code. Argparse ends the process for unknown arguments."""
    parser = argparse.ArgumentParser(
        prog="relax stall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a live run")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help=f"seconds to wait for the report (default: {TIMEOUT_S:g})",
    )
    given = parser.parse_args(words)
    if not any((given.run / mark).is_file() for mark in MARKS):
        print(f"relax stall: {given.run} is not a folder of a run: it has no {' and no '.join(MARKS)}", file=sys.stderr)
        return _NO_RUN
    if (state := run_state(given.run)) != LIVE:
        print(
            f"relax stall: the run in {given.run} has ended ({state}) and waits for nothing",
            file=sys.stderr,
        )
        return _NO_REPORT
    try:
        report = request_report(given.run, timeout_s=given.timeout, goes_on=lambda: run_state(given.run) == LIVE)
    except NoAnswer as error:
        print(
            f"relax stall: there is no report: {error}. A run sends no report while its services start or restart; "
            f"{given.run / 'logs'} has the logs of all processes",
            file=sys.stderr,
        )
        return _NO_REPORT
    except OSError as error:
        print(f"relax stall: {given.run} cannot be queried: {error}", file=sys.stderr)
        return _NO_REPORT
    print(report, end="")
    return 0
