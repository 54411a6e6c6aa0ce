"""Sends one message in a process of its own: for a run whose controller is dead, and for ``relax notify test``.

    python -m relax_core.observe.alarms.tell_once URLS_FILE TITLE TEXT

It prints a line for each receiver that did not take the message, and then ends with exit code 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from relax_core.observe.alarms.alarm_sender import AlarmSender, Notify
from relax_core.observe.alarms.urls_file import read_receivers

END_S = 40.0  # three tries


def tell(receivers: Sequence[tuple[str, Notify]], *, title: str, text: str) -> list[str]:
    """Sends a message to all receivers and returns a line for each that did not take it."""
    lines: list[str] = []
    sender = AlarmSender(receivers, lines.append)
    sender.put(title, text)
    sender.close(timeout_s=END_S)
    return lines


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    urls_file, title, text = words
    lines = tell(read_receivers(Path(urls_file)), title=title, text=text)
    print("\n".join(lines), end="\n" if lines else "", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
