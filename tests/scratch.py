"""The one place outside of pytest's own folder where a test session makes things; what tests leave in it is told.

It is the session's TMPDIR, so that folders, sockets and processes say by themselves whose they are. Two sessions beside
each other do not meet; what one left that was killed, the next removes.
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
PREFIXES = ("rx", "st", "slurm-test-")  # of this, and of `tests.slurm.cluster`, whose daemons want folders of their own
STAYS = (OWNER_FILE, "r", "torchinductor_*")  # to the end; r is Ray's folder for all tests, the last a cache of torch's
GONE_S = 30.0
POLL_S = 0.05


class Scratch:
    """``folder``: short, since paths of sockets lie below it, and they may have 107 bytes."""

    def __init__(self) -> None:
        for prefix in PREFIXES:
            remove_dead(prefix)
        self.folder = TEMPORARY / f"{PREFIXES[0]}{secrets.token_hex(3)}"
        self.folder.mkdir(mode=0o700)
        self._first_seen: dict[str, str] = {}
        self._undo = ExitStack()
        self._undo.enter_context(owned(self.folder, f"a test session, process {os.getpid()}"))

    def as_tmpdir(self) -> None:
        """From now on, for this process and all that it starts. pytest's folders stay where they were."""
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)

    def note(self, test: str) -> None:
        """``test`` has ended: what was not there before is its own."""
        for name in self._names():
            self._first_seen.setdefault(name, test)

    def left(self) -> list[str]:
        """What is there still after `GONE_S` seconds, one line each, with the test that it is of."""
        deadline = time.monotonic() + GONE_S
        while (names := self._names()) | (processes := processes_in(self.folder)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        lines = [f"{name}, first seen after {self._first_seen.get(name, 'the last test')}" for name in sorted(names)]
        return lines + [f"process {pid}: {words}" for pid, words in sorted(processes.items())]

    def close(self) -> None:
        """Ends and removes all that there is."""
        kill_trees(processes_in(self.folder))
        for name in self._names():
            if Path(name).parent != self.folder:  # in shared memory
                shutil.rmtree(name)
        shutil.rmtree(self.folder, ignore_errors=True)  # `left` has told; a cache may just be written
        self._undo.close()

    def _names(self) -> dict[str, None]:
        inside = (path for path in self.folder.iterdir() if not any(fnmatch.fnmatch(path.name, one) for one in STAYS))
        return dict.fromkeys(map(str, [*inside, *self._shared_memory()]))

    def _shared_memory(self) -> Iterator[Path]:
        """Folders there that tests named after this one, and those of runs whose other folder is in this one."""
        for path in SHARED_MEMORY.iterdir():
            words = ""
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                words = read_owner(path)
            if self.folder.name in path.name or f"{self.folder}/" in words:
                yield path


def remove_dead(prefix: str) -> None:
    """What a session left that was killed: folders that `owned` marked, and processes with such a TMPDIR."""
    for folder in TEMPORARY.glob(f"{prefix}*"):
        with suppress(FileNotFoundError), claimed(folder) as dead:
            if dead:
                kill_trees(processes_in(folder))
                shutil.rmtree(folder)


def processes_in(folder: Path) -> dict[int, str]:
    """Process id → its command, and the test that started it, of those that `processes_of` finds; not ours."""
    found = {}
    for pid in set(processes_of(folder)) - {os.getpid()}:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and "multiprocessing.resource_tracker" in command:
                continue  # our own one, of processes that were spawned: it ends with us
            test = re.search(rb"PYTEST_CURRENT_TEST=([^\0]*)", Path(f"/proc/{pid}/environ").read_bytes())
            found[pid] = f"{command[:200]} (of {test[1].decode() if test else 'no test'})"
    return found
