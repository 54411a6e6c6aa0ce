"""Starts Python processes of Relax, and finds the line of their output that says why they failed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
_LOG_TAIL_BYTES = 1 << 16
_NO_CAUSE = re.compile(r"\s|Traceback \(most recent call last\)|\^+$|During handling of|The above exception was")


def module_command(module: str, *words: str) -> list[str]:
    """Returns the command line that runs a module of Relax.

    The working folder comes last where modules are looked for (`relax_core`), so that a user's types.py is not taken
    for Python's own. It comes first only if it is a checkout of Relax that is not installed, which nothing else names.
    """
    by_folder = os.getcwd() == _ROOT and not sys.flags.safe_path
    safe = ["-P"] if sys.path.count(_ROOT) > by_folder else []
    return [sys.executable, *safe, "-m", module, *words]


def import_path() -> str:
    """Returns PYTHONPATH for a process that imports what this process can import; its working folder comes last."""
    entries = sys.path[:-1] if sys.path[-1:] == [os.getcwd()] else sys.path
    return os.pathsep.join([_ROOT, *entries])


def cause_in(output: str | bytes) -> str:
    """Returns the line of a process's output that says why it failed; empty if there is no output.

    That is the last line, or with a traceback at the end the line of its error.
    """
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if not _NO_CAUSE.match(line)), lines[-1].strip() if lines else "")


def cause_in_log(log: Path, *, after: int = 0) -> str:
    """Returns `cause_in` of what a log has behind its first ``after`` bytes; empty if there is no such log."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(after, size - _LOG_TAIL_BYTES))
            return cause_in(file.read())
    except OSError:
        return ""
