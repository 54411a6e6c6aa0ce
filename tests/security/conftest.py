"""Marks every test of this folder as `security` and provides a second, hostile user of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PYTHON = "/usr/bin/python3"  # the system's interpreter: the second user may not read root's virtual environment
INTRUDER = 61_111  # a user id without an account and without processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.security)


@dataclass(frozen=True)
class SecondUser:
    """Runs programs as another user of this machine, without special rights."""

    uid: int

    def popen(self, program: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
        """Starts a Python program, given as text, as the second user. It may import only the standard library."""
        return subprocess.Popen(
            [PYTHON, "-I", "-u", "-c", program, *map(str, arguments)],
            user=self.uid,
            group=self.uid,
            extra_groups=[],
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,  # type: ignore[call-overload]
        )

    def run(self, program: str, *arguments: object, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a Python program as the second user until it ends, and returns its output."""
        with self.popen(program, *arguments) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, output)


@pytest.fixture(scope="session")
def second_user() -> SecondUser:
    if os.getuid() != 0:
        pytest.skip("only root can run programs as a second user")
    return SecondUser(INTRUDER)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """Makes a folder that every user of this machine can enter, like a home directory. pytest's folders are private."""
    folder = Path(tempfile.mkdtemp(prefix="relax-shared-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
