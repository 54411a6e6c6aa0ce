"""Finds the rank, node and attempt of a task in its Slurm job, and makes the task's temporary folder on the node."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launchers.slurm.job_state import slurm_answer

PREFIX = "rs"  # prefix of a folder name, before the job's number
BASE_BYTES = 9  # limit of TMPDIR's path: sockets have paths of at most 107 bytes, and Ray's names need the rest
RANDOM_BYTES = 4
RANDOM = "[A-Za-z0-9_-]{6}"  # base64 text of the random bytes
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class TaskIdentity:
    """Identifies one task of a Slurm job. A job has one task per node.

    ``rank`` counts the tasks from 0. ``job_id`` is the number that the user sees ("12", or "12_3" in an array).
    ``raw_job_id`` is Slurm's internal number. ``restarts`` is the number of requeues. ``address`` is this node's IP
    address.
    """

    rank: int
    nodes: int
    job_id: str
    raw_job_id: str
    restarts: int
    node: str
    address: str

    @property
    def attempt(self) -> str:
        """Returns the name of this start of the job."""
        return f"{self.job_id}-r{self.restarts}"

    @classmethod
    def of_environment(cls) -> TaskIdentity:
        """Reads the identity from Slurm's environment variables."""
        env = os.environ
        raw, node, nodes = env["SLURM_JOB_ID"], env["SLURMD_NODENAME"], int(env["SLURM_JOB_NUM_NODES"])
        array = env.get("SLURM_ARRAY_JOB_ID")
        return cls(
            rank=int(env["SLURM_PROCID"]),
            nodes=nodes,
            job_id=f"{array}_{env['SLURM_ARRAY_TASK_ID']}" if array else raw,
            raw_job_id=raw,
            restarts=int(env.get("SLURM_RESTART_COUNT", "0")),
            node=node,
            address=_address(node) if nodes > 1 else LOOPBACK,
        )


def _address(node: str) -> str:
    """Returns the IP address at which Slurm's daemons contact this node."""
    shown = slurm_answer("scontrol", "show", "node", node, "-o")
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return socket.gethostbyname(found[1] if found else node)


@contextmanager
def task_folder(raw_job_id: str) -> Iterator[Path]:
    """Makes a folder for this task, and removes it after the block.

    First removes the folders of killed jobs. The folder is under TMPDIR, or under /tmp if TMPDIR's path is too long for
    socket paths.
    """
    base = Path(tempfile.gettempdir())
    if len(str(base)) > BASE_BYTES:
        base = Path("/tmp")
    _remove_stale_folders(base)
    folder = (
        base / f"{PREFIX}{raw_job_id}-{secrets.token_urlsafe(RANDOM_BYTES)}"
    )  # a random name, so that no other user can create the folder first
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a daemon may still write its last log line


def _remove_stale_folders(base: Path) -> None:
    found_folders = {
        folder: found[1]
        for folder in base.glob(f"{PREFIX}*-*")
        if (found := re.fullmatch(rf"{PREFIX}(\d+)-{RANDOM}", folder.name)) and _is_folder_of_user(folder)
    }
    if not found_folders:
        return
    queued = set(slurm_answer("squeue", "--noheader", "--format=%A").split())
    for folder, job in found_folders.items():
        if job not in queued:
            shutil.rmtree(folder, ignore_errors=True)  # another task on this node may be removing the same folder


def _is_folder_of_user(folder: Path) -> bool:
    """Returns whether a path in a shared folder is a real folder (not a link) of this user."""
    try:
        found = folder.lstat()
    except FileNotFoundError:  # another task has just removed the folder
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
