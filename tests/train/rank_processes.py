"""Starts a script of this folder as the ranks of one model, with a process for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.ports import free_port
from tests.train.rank_server import SERVER

HERE = Path(__file__).parent


def run_ranks(
    script: str, arguments: Sequence[Sequence[object]], *, world_size: int | None = None, timeout_s: float = 600.0
) -> list[tuple[int, str]]:
    """Runs ``script`` as rank 0, 1, … and returns the exit status and stderr of each.

    Its arguments are <rank> <world size> <port> and the rank's own ``arguments``. ``world_size`` is larger than the
    number of processes if some ranks must never join.
    """
    port, size = free_port(), world_size or len(arguments)
    programmes = [[str(HERE / script), *map(str, (rank, size, port, *own))] for rank, own in enumerate(arguments)]
    return SERVER.run(programmes, timeout_s=timeout_s)


def run_programme(*words: object, timeout_s: float = 600.0) -> None:
    """Runs a script of this folder, or a module by its name, with arguments, as the ranks are run."""
    programme = [str(HERE / one) if one.endswith(".py") else one for one in map(str, words)]
    ((status, error),) = SERVER.run([programme], timeout_s=timeout_s)
    assert status == 0, error


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
