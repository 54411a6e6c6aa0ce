"""Starts a script of this folder as the ranks of one model, with a process for each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.ports import free_port

HERE = Path(__file__).parent


def run_ranks(
    script: str, arguments: Sequence[Sequence[object]], *, world_size: int | None = None, timeout_s: float = 600.0
) -> list[tuple[int, str]]:
    """Runs ``script`` as rank 0, 1, … and returns the exit status and stderr of each.

    Its arguments are <rank> <world size> <port> and the rank's own ``arguments``. ``world_size`` is larger than the
    number of processes if some ranks must never join.
    """
    port = free_port()
    environment = os.environ | {
        "PYTHONPATH": f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    size = world_size or len(arguments)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, (rank, size, port, *own))],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(arguments)
    ]
    try:
        errors = [process.communicate(timeout=timeout_s)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [(process.returncode, error) for process, error in zip(ranks, errors, strict=True)]


def run_dp_ranks(
    folder: Path,
    output: Path,
    *,
    steps: list[int],
    sharded: bool = False,
    timeout_s: float = 300.0,
    what: str = "policy",
) -> list[tuple[int, str]]:
    """Runs two data-parallel ranks (dp_rank.py), each for its own number of ``steps``.

    The second rank may never join, and a rank with fewer steps leaves the other one alone.
    """
    arguments = [(folder, output, int(sharded), own, timeout_s, what, max(steps)) for own in steps]
    return run_ranks("dp_rank.py", arguments, world_size=2)
