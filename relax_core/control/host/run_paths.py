"""Makes the temporary paths of a run: a folder under /tmp, a folder for weights, and its namespace in Ray."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from relax_core.control.host.lock_file import owned
from relax_core.engines.sglang.scratch import remove_left_scratch

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX, WEIGHTS_PREFIX = "rlx-", "relax-"
BASE_BYTES = 26  # a socket's path has at most 107 bytes; Ray's names below a run's folder take the rest


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """Holds the temporary paths of one attempt of a run.

    All folders have mode 0700. ``folder`` is for Ray's files and its token; its path is short because names of sockets
    are. ``weights_folder`` is for published weights. ``token_folder`` is for the run's bearer token, and every process
    of the run can read it. ``namespace`` is the run's namespace in Ray.
    """

    folder: Path
    weights_folder: Path
    token_folder: Path
    namespace: str


def temporary_folder() -> Path:
    """Returns the parent of the temporary folders: TMPDIR, or /tmp if TMPDIR's path is too long for sockets."""
    folder = Path(tempfile.gettempdir())
    return folder if len(os.fsencode(folder)) <= BASE_BYTES else Path("/tmp")


@contextmanager
def run_paths(*, run_dir: Path, shared: bool = False) -> Iterator[RunPaths]:
    """Makes the folders for one attempt of the run in ``run_dir``, and removes them when the block ends.

    If the whole run is killed, the remaining folders name their owner (`lock_file`). With ``shared``, weights and token
    lie in ``run_dir``, which all nodes of the run see; else the weights lie in this machine's memory.
    """
    owner = f"the run in {run_dir} (process {os.getpid()} of {socket.gethostname()})"
    namespace = f"{WEIGHTS_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    with ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=temporary_folder()))
        undo.enter_context(owned(folder, owner))
        # Errors ignored: a Ray daemon may still be writing its last log line.
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        undo.callback(remove_left_scratch, folder)
        weights_folder = (run_dir if shared else SHARED_MEMORY) / namespace
        weights_folder.mkdir(mode=0o700, parents=shared)
        if not shared:  # a shared disk may have no locks
            undo.enter_context(owned(weights_folder, f"{owner}, beside {folder}"))
            # Copies of weights for servers of somebody else, if one joined.
            undo.callback(shutil.rmtree, run_dir / namespace, ignore_errors=True)
        undo.callback(shutil.rmtree, weights_folder, ignore_errors=shared)  # a network file system may hold a file
        token_folder = weights_folder if shared else folder
        yield RunPaths(folder=folder, weights_folder=weights_folder, token_folder=token_folder, namespace=namespace)
