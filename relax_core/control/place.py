"""What a run has beside its own folder: one under /tmp, one for weights, and a name in Ray."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """``folder``: Ray's files and its token, short because of socket names. ``weights_folder``: published weights.
    ``token_folder``: for the run's bearer token, where every process of the run can read it. All are 0700.
    ``namespace``: the run's own in Ray."""

    folder: Path
    weights_folder: Path
    token_folder: Path
    namespace: str


@contextmanager
def run_place(*, shared: Path | None = None) -> Iterator[RunPlace]:
    """Makes a place for one attempt of a run, and removes it afterwards; also what a dead run left in memory.

    ``shared``: a folder that all nodes of the run see. Weights and token lie there then, else in this machine's memory.
    """
    _remove_dead_runs_weights()
    namespace = f"relax-{os.getpid()}-{secrets.token_hex(4)}"  # tells whose a folder is that a kill left behind
    with ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix="rlx-"))
        # Errors ignored: a Ray daemon may still be writing its last log line.
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        weights_folder = (SHARED_MEMORY if shared is None else shared) / namespace
        weights_folder.mkdir(mode=0o700, parents=shared is not None)
        undo.callback(shutil.rmtree, weights_folder)
        token_folder = folder if shared is None else weights_folder
        yield RunPlace(folder=folder, weights_folder=weights_folder, token_folder=token_folder, namespace=namespace)


def _remove_dead_runs_weights() -> None:
    """What a run left in memory that was killed with its supervisor; its folder's name tells the process."""
    import psutil

    for left in SHARED_MEMORY.glob("relax-*-*"):
        owner = left.name.split("-")[1]
        if owner.isdigit() and not psutil.pid_exists(int(owner)) and left.stat().st_uid == os.getuid():
            shutil.rmtree(left)
