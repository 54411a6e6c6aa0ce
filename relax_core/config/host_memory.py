"""Measures the memory that this machine has left."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Returns the bytes that can still be used: of the machine, or of the container's limit if that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = _CGROUP / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used = int((_CGROUP / "memory.current").read_text()) - int(statistics["inactive_file"])
        free = min(free, int(text) - used)
    return free
