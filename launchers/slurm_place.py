"""Where a task of a Slurm job stands: its rank, its node, its attempt; and what dead jobs left on the node."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launchers.slurm_state import slurm_answer

PREFIX = "rs"  # and the job's number
BASE_BYTES = 11  # a socket's path has 107 bytes, of which Ray and what is made here take the rest
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class TaskIdentity:
    """``rank``: of this task; one a node. ``job_id``: as the user knows it ("12", or "12_3" in an array);
    ``raw_job_id``: Slurm's own number. ``restarts``: times that the job was queued again. ``address``: this node's."""

    rank: int
    nodes: int
    job_id: str
    raw_job_id: str
    restarts: int
    node: str
    address: str

    @property
    def attempt(self) -> str:
        """Names one start of one job."""
        return f"{self.job_id}-r{self.restarts}"

    @classmethod
    def of_environment(cls) -> TaskIdentity:
        """As Slurm's variables say."""
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
    """The address by which Slurm's own daemons reach this node."""
    told = slurm_answer("scontrol", "show", "node", node, "-o")
    found = re.search(r"\bNodeAddr=(\S+)", told)
    return socket.gethostbyname(found[1] if found else node)


@contextmanager
def task_folder(raw_job_id: str) -> Iterator[Path]:
    """A folder of this task under TMPDIR, or under /tmp where that is too long for names of sockets. It goes with the
    task, and what jobs left that were killed goes now."""
    base = Path(tempfile.gettempdir())
    if len(str(base)) > BASE_BYTES:
        base = Path("/tmp")
    _remove_dead(base)
    folder = base / f"{PREFIX}{raw_job_id}-{secrets.token_hex(2)}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a daemon may be writing its last line


def _remove_dead(base: Path) -> None:
    left = {
        folder: found[1]
        for folder in base.glob(f"{PREFIX}*-*")
        if (found := re.fullmatch(rf"{PREFIX}(\d+)-[0-9a-f]{{4}}", folder.name)) and folder.stat().st_uid == os.getuid()
    }
    if not left:
        return
    alive = set(slurm_answer("squeue", "--noheader", "--format=%A").split())
    for folder, job in left.items():
        if job not in alive:
            shutil.rmtree(folder, ignore_errors=True)  # another task of this node may be at the same one
