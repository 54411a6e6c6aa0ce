"""Reads the log files of a run in pieces, and searches them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from relax_core.server.run_folders import files_in, inside, open_inside

LOGS = "logs"
CHUNK = 64 * 2**10
SEARCHED_BYTES, MOST_FOUND, MOST_LINE = 64 * 2**20, 500, 2000
MOST_READ_LINE = 2**20  # bytes of a line that are looked at as one
MOST_FILES = 5000


def log_files(run_dir: Path) -> list[dict[str, Any]]:
    """Returns name and size in bytes of each log file, at most `MOST_FILES`.

    Left out are links that lead out of the run's folder, what is no plain file, and names that are no text.
    """
    found = []
    for path in files_in(run_dir, LOGS, most=MOST_FILES):
        try:
            size = inside(run_dir, LOGS, path.name).stat().st_size
            path.name.encode()
        except (OSError, ValueError):  # it is no plain file, or its name is no text
            continue
        found.append({"name": path.name, "size": size})
    return found


def log_chunk(run_dir: Path, name: str, start: int | None) -> dict[str, Any]:
    """Returns at most 64 KiB of text from byte ``start`` on, of the file's end without it, and where it stops.

    A piece ends behind a line unless one line is larger, so a line that is being written comes with a later call.
    Raises what `inside` raises.
    """
    with open_inside(run_dir, LOGS, name) as file:
        size = os.fstat(file.fileno()).st_size
        first = max(0, size - CHUNK) if start is None or start > size else max(0, start)
        file.seek(first)
        data = file.read(CHUNK)
    end = data.rfind(b"\n") + 1
    if not end and len(data) == CHUNK:
        end = len(data)
    return {"text": data[:end].decode("utf-8", "replace"), "from": first, "next": first + end, "size": size}


def search_log(run_dir: Path, name: str, words: str) -> dict[str, Any]:
    """Returns the lines that contain ``words``, in any case, of the file's last 64 MiB; at most the last 500."""
    wanted = words.casefold()
    found: list[str] = []
    with open_inside(run_dir, LOGS, name) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - SEARCHED_BYTES))
        while line := file.readline(MOST_READ_LINE):
            text = line.decode("utf-8", "replace").rstrip("\n")
            if wanted in text.casefold():
                found.append(text[:MOST_LINE])
                del found[:-MOST_FOUND]
    return {"text": "\n".join(found), "found": len(found), "size": size}
