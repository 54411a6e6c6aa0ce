"""What runs that were killed with their supervisor have left: Ray's daemons, folders in /tmp and in shared memory."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
STARTING_S = 300.0  # a run makes its folder before its Ray is there to be seen
_RAY_DAEMONS = ("/gcs/gcs_server", "/raylet/raylet")


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """``removal``: the command that removes it."""

    what: str
    removal: str


def leftovers(
    *, temporary: Path | None = None, shared_memory: Path = SHARED_MEMORY, user: int | None = None
) -> list[Leftover]:
    """Of this user's runs. What a living run holds is not among them."""
    user = os.getuid() if user is None else user
    commands = _commands(user)
    found = [
        Leftover(what=f"Ray daemon {pid} without a run", removal=f"kill {pid}")
        for pid, (parent, command) in commands.items()
        if parent == 1 and any(daemon in command for daemon in _RAY_DAEMONS)
    ]
    for folder in sorted((temporary or Path(tempfile.gettempdir())).glob("rlx-*")):
        held = any(str(folder) in command for _, command in commands.values())
        starting = time.time() - folder.stat().st_mtime < STARTING_S
        if folder.stat().st_uid == user and not held and not starting:
            found.append(Leftover(what=f"{folder} of a dead run", removal=f"rm -r {folder}"))
    for folder in sorted(shared_memory.glob("relax-*-*")):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and folder.stat().st_uid == user:
            found.append(Leftover(what=f"{folder}, weights of a dead run", removal=f"rm -r {folder}"))
    return found


def _commands(user: int) -> dict[int, tuple[int, str]]:
    """Process id → its parent and its command line, of this user's processes."""
    import psutil

    found = {}
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "uids"]):
        values = process.info
        if values["uids"] is not None and values["uids"].real == user:
            found[values["pid"]] = (values["ppid"], " ".join(values["cmdline"] or []))
    return found
