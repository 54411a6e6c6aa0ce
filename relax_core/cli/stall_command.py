"""Prints what a run that goes on waits for: ``relax stall RUN``.

The report is the watchdog's: what each worker does and which worker waits for which, the workers at the end of the
chain that begins at the trainer, and their stacks. No train step waits for it. The exit code is 1 if the run has ended
or gives no report in time, and 2 if there is no such run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_core.observe.stall_asks import TIMEOUT_S, NoAnswer, ask_for_report
from relax_core.server.run_folders import MARKS, run_state

LIVE = "live"
_NO_REPORT, _NO_RUN = 1, 2


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit code. Argparse ends the process for words that are none of its own."""
    parser = argparse.ArgumentParser(
        prog="relax stall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run that goes on")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S", help=f"seconds to wait for the report; {TIMEOUT_S:g}"
    )
    given = parser.parse_args(words)
    if not any((given.run / mark).is_file() for mark in MARKS):
        print(f"relax stall: {given.run} is no folder of a run: it has no {' and no '.join(MARKS)}", file=sys.stderr)
        return _NO_RUN
    if (state := run_state(given.run)) != LIVE:
        print(f"relax stall: the run in {given.run} does not go on any more ({state}), so it waits for nothing")
        return _NO_REPORT
    try:
        report = ask_for_report(given.run, timeout_s=given.timeout, goes_on=lambda: run_state(given.run) == LIVE)
    except NoAnswer as error:
        print(
            f"relax stall: there is no report: {error}. While the services of a run start, and for a moment when they "
            f"start again, nobody answers; {given.run / 'logs'} has the logs of all processes",
            file=sys.stderr,
        )
        return _NO_REPORT
    except OSError as error:
        print(f"relax stall: {given.run} cannot be asked: {error}", file=sys.stderr)
        return _NO_REPORT
    print(report, end="")
    return 0
