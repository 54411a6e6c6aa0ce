"""Keeps all files of an SGLang server in one folder, to remove them after the server's end.

Files and sockets are in the folder. Names of objects in shared memory contain the folder's name.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path
from types import ModuleType
from typing import Any

from relax_core.contracts.engine import EngineError
from relax_core.engines.sglang.sglang_patches import after_import

VARIABLE = "RELAX_ENGINE_SCRATCH"  # environment variable: the server's folder
PREFIX = "relax-sglang-"
SHARED_MEMORY = Path("/dev/shm")
SOCKET_PATH_BYTES = 107  # the kernel's limit
SOCKET_NAME = "/tmp12345678"  # has the length of the names of SGLang's sockets
POLL_S = 0.01


def new_scratch() -> Path:
    """Makes the folder of one server. Raises EngineError if the paths of its sockets would be too long."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    excess = len(os.fsencode(f"{folder}{SOCKET_NAME}")) - SOCKET_PATH_BYTES
    if excess > 0:
        folder.rmdir()
        raise EngineError(
            f"TMPDIR={folder.parent} is {excess} bytes too long: paths of SGLang's sockets may have "
            f"{SOCKET_PATH_BYTES} bytes"
        )
    return folder


def keep_to_scratch(folder: Path) -> None:
    """Makes this process put its files into ``folder``. Call it in each process of the server before importing sglang.

    Shared tensors of torch need no change: torch removes their names as soon as the tensors are shared.
    """
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    process: Any = multiprocessing.current_process()
    process._config["semprefix"] = f"/{folder.name}"
    memory: Any = shared_memory
    memory._make_filename = lambda: f"/{folder.name}-{secrets.token_hex(4)}"

    def loads_in_folder(module: ModuleType) -> None:
        module.shm_path_for = lambda instance: f"{folder}/loads-{instance}"  # type: ignore[attr-defined]

    after_import("sglang.srt.managers.load_snapshot", loads_in_folder)


def end_session(leader: int, *, timeout_s: float) -> None:
    """Kills the remaining processes in the session of the ended process ``leader``, and waits for their end.

    Raises EngineError if a process still runs after ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while left := list(_session(leader)):
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise EngineError(f"processes {left} of SGLang's server {leader} still run {timeout_s:g} s after SIGKILL")
        time.sleep(POLL_S)


def _session(leader: int) -> Iterator[int]:
    """Yields the running processes of a session."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # the process has ended since
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state not in "ZX":
                    yield int(entry.name)


def remove_left_scratch(parent: Path) -> None:
    """Removes folders in ``parent`` that remained because server and engine owner were killed together."""
    for folder in parent.glob(f"{PREFIX}*"):
        remove_scratch(folder)


def remove_scratch(folder: Path) -> None:
    """Removes a server's folder and shared memory, if they still exist. All processes of the server must have ended."""
    for shared in SHARED_MEMORY.glob(f"*{folder.name}*"):
        with suppress(FileNotFoundError):
            if shared.lstat().st_uid == os.getuid():  # other users' files may have names that contain this name
                shared.unlink()
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
