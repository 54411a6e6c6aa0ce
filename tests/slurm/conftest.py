"""Shares one temporary Slurm between all tests. Skips the tests if the machine has no Slurm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

NEEDED = ("sbatch", "slurmctld", "slurmd", "munged")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    why = f"not installed: {', '.join(missing)}; `make test-slurm` says how" if missing else ""
    why = why or ("a Slurm of our own needs root" if os.getuid() else "")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster() as slurm:
        yield slurm


@pytest.fixture
def quiet(cluster: Cluster) -> Iterator[Cluster]:
    """Yields the cluster with an empty queue, and asserts afterwards that no process or folder of a job is left."""
    cluster.wait_idle()
    yield cluster
    cluster.clean()
    cluster.assert_nothing_left()
