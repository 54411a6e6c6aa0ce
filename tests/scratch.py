"""Manages the temporary folder of a test session, and reports files and processes that tests leave in this folder.

The folder is the session's TMPDIR, so the owner of folders, sockets and processes is known. Concurrent sessions are
separate. The next session removes the remains of a killed session.
"""

from __future__ import annotations

import fnmatch
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from relax_core.contracts.process_trees import kill_trees
from relax_core.control.host.run_paths import OWNER_FILE, SHARED_MEMORY, claimed, owned, processes_of, read_owner

TEMPORARY = Path("/tmp")
PREFIXES = ("rx", "st", "slurm-test-")  # for folders of this module, and of `tests.slurm.cluster`
STAYS = (OWNER_FILE, "r", "torchinductor_*")  # stays to the end; "r" is Ray's folder for all tests
GONE_S = 30.0
POLL_S = 0.05


class Scratch:
    """Holds the scratch ``folder``. Its path is short, because paths of sockets in it may have at most 107 bytes."""

    def __init__(self) -> None:
        for prefix in PREFIXES:
            remove_dead(prefix)
        self.folder = TEMPORARY / f"{PREFIXES[0]}{secrets.token_hex(3)}"
        self.folder.mkdir(mode=0o700)
        self._first_seen: dict[str, str] = {}
        self._undo = ExitStack()
        self._undo.enter_context(owned(self.folder, f"a test session, process {os.getpid()}"))

    def as_tmpdir(self) -> None:
        """Makes the folder the TMPDIR of this process and its children. Does not move pytest's folders."""
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)

    def note(self, test: str) -> None:
        """Assigns all new names to ``test``, which has just ended."""
        for name in self._names():
            self._first_seen.setdefault(name, test)

    def left(self) -> list[str]:
        """Returns a line for each name or process that remains after `GONE_S` seconds, with its test."""
        deadline = time.monotonic() + GONE_S
        while (names := self._names()) | (processes := processes_in(self.folder)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        lines = [f"{name}, first seen after {self._first_seen.get(name, 'the last test')}" for name in sorted(names)]
        return lines + [f"process {pid}: {words}" for pid, words in sorted(processes.items())]

    def close(self) -> None:
        """Ends all processes and removes all folders."""
        kill_trees(processes_in(self.folder))
        for name in self._names():
            if Path(name).parent != self.folder:  # in shared memory
                shutil.rmtree(name)
        shutil.rmtree(self.folder, ignore_errors=True)  # `left` has reported remains already; a cache may be in use
        self._undo.close()

    def _names(self) -> dict[str, None]:
        inside = (
            path for path in self.folder.iterdir() if not any(fnmatch.fnmatch(path.name, pattern) for pattern in STAYS)
        )
        return dict.fromkeys(map(str, [*inside, *self._shared_memory()]))

    def _shared_memory(self) -> Iterator[Path]:
        """Yields folders in shared memory that are named after this folder or belong to a run in this folder."""
        for path in SHARED_MEMORY.iterdir():
            words = ""
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                words = read_owner(path)
            if self.folder.name in path.name or f"{self.folder}/" in words:
                yield path


def remove_dead(prefix: str) -> None:
    """Removes the remains of killed sessions: folders that `owned` marked, and processes with such a TMPDIR."""
    for folder in TEMPORARY.glob(f"{prefix}*"):
        with suppress(FileNotFoundError), claimed(folder) as dead:
            if dead:
                kill_trees(processes_in(folder))
                shutil.rmtree(folder)


def processes_in(folder: Path) -> dict[int, str]:
    """Returns by pid the command and the test of the processes in ``folder``, without this process."""
    found = {}
    for pid in set(processes_of(folder)) - {os.getpid()}:
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended meanwhile
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and "multiprocessing.resource_tracker" in command:
                continue  # such a process belongs to this process and ends with it
            test = re.search(rb"PYTEST_CURRENT_TEST=([^\0]*)", Path(f"/proc/{pid}/environ").read_bytes())
            found[pid] = f"{command[:200]} (of {test[1].decode() if test else 'no test'})"
    return found
