"""Where an SGLang server of ours leaves things while it runs, so that whoever sees its end can remove all of them.

Files and sockets lie in a folder of its own. What must have a name in shared memory has the folder's in it.
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
from relax_core.engines.sglang.server.import_hooks import after_import

VARIABLE = "RELAX_ENGINE_SCRATCH"  # tells the server its folder
PREFIX = "relax-sglang-"
SHARED_MEMORY = Path("/dev/shm")
SOCKET_PATH_BYTES = 107  # the kernel's limit
SOCKET_NAME = "/tmp12345678"  # as SGLang makes them
LOOK_S = 0.01


def new_scratch() -> Path:
    """Makes the folder of one server. Raises EngineError where its sockets would have too long a path."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    excess = len(os.fsencode(f"{folder}{SOCKET_NAME}")) - SOCKET_PATH_BYTES
    if excess > 0:
        folder.rmdir()
        raise EngineError(
            f"TMPDIR={folder.parent} is {excess} bytes too long: paths of SGLang's sockets may have {SOCKET_PATH_BYTES}"
        )
    return folder


def keep_to_scratch(folder: Path) -> None:
    """In each process of the server, before it imports sglang. torch's tensors need nothing: their names are gone as
    soon as they are shared."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    process: Any = multiprocessing.current_process()
    process._config["semprefix"] = f"/{folder.name}"
    memory: Any = shared_memory
    memory._make_filename = lambda: f"/{folder.name}-{secrets.token_hex(4)}"

    def loads_in_folder(module: ModuleType) -> None:
        module.shm_path_for = lambda instance: f"{folder}/loads-{instance}"  # type: ignore[attr-defined]

    after_import("sglang.srt.managers.load_snapshot", loads_in_folder)


def end_session(leader: int, *, timeout_s: float) -> None:
    """Kills what is left of the session of a process that has ended, and waits until it is gone. Raises EngineError
    past the deadline."""
    deadline = time.monotonic() + timeout_s
    while left := list(_session(leader)):
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise EngineError(f"processes {left} of SGLang's server {leader} outlive SIGKILL by {timeout_s:g} s")
        time.sleep(LOOK_S)


def _session(leader: int) -> Iterator[int]:
    """Its living processes."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it ended meanwhile
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state not in "ZX":
                    yield int(entry.name)


def remove_left_scratch(parent: Path) -> None:
    """Of all servers that had their folders there and were killed with their owners."""
    for folder in parent.glob(f"{PREFIX}*"):
        remove_scratch(folder)


def remove_scratch(folder: Path) -> None:
    """After the end of all processes of the server; it may have done so itself."""
    for left in SHARED_MEMORY.glob(f"*{folder.name}*"):
        left.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
