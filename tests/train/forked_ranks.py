"""Runs a single process and then two ranks of one program, for the programs that compare layouts with one rank."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch

from tests.ports import free_port


def run_alone_and_on_two_ranks(
    folder: Path, alone: Callable[[Path], None], rank_main: Callable[[Path, int, int], None]
) -> int:
    """Runs ``alone(folder)``, then ``rank_main(folder, rank, port)`` on two ranks; returns the largest exit code."""
    torch.set_num_threads(1)
    port = free_port()
    fork = multiprocessing.get_context("fork")  # An import takes seconds, so one process runs all layouts.
    single = fork.Process(target=alone, args=(folder,))
    single.start()
    single.join()
    ranks = [fork.Process(target=rank_main, args=(folder, rank, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in (single, *ranks))
