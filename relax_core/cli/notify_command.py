"""Sends a test notification to each address of a ``notify.urls_file``: ``relax notify test FILE``.

The exit code is 1 if an address did not accept the notification, and 2 if the file cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_core.observe.alarms import read_receivers, send_message

_NOT_TAKEN, _UNUSABLE = 1, 2


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit code. Argparse ends the process for unknown arguments."""
    parser = argparse.ArgumentParser(
        prog="relax notify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["test"])
    parser.add_argument("urls_file", type=Path, metavar="FILE", help="a file in the format of notify.urls_file")
    given = parser.parse_args(words)
    try:
        receivers = read_receivers(given.urls_file)
    except ValueError as error:
        print(f"relax notify: {error}", file=sys.stderr)
        return _UNUSABLE
    not_taken = 0
    for name, notify in receivers:
        lines = send_message(
            [(name, notify)], title="Relax: a test", text="A run would send its notifications like this."
        )
        not_taken += bool(lines)
        print(lines[0] if lines else f"{name} accepted the message")
    return _NOT_TAKEN if not_taken else 0
