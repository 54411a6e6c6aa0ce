"""Adds this folder to the import path, so that tests share tiny_trainer.py, and makes small disks."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Returns a function that makes a file system of a size such as 1m; it skips the test if it may not."""
    disk = tmp_path / "disk"

    def make(size: str) -> Path:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        mount = subprocess.run(command, capture_output=True, text=True, check=False)
        if mount.returncode:
            pytest.skip(f"needs leave to mount a tmpfs: {mount.stderr.strip()}")
        return disk

    yield make
    if disk.is_mount():
        subprocess.run(["umount", str(disk)], check=True)
