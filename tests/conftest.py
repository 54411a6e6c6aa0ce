"""What all tests share: one small local Ray for the whole session."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RAY_FOLDER = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Ray reads these when it is imported, and test files import it while pytest collects them."""
    # Short: Ray's socket paths lie below it and may have 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="rx", dir="/tmp"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    config.stash[RAY_FOLDER] = folder


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[RAY_FOLDER], ignore_errors=True)


@pytest.fixture(scope="session")
def ray_session(pytestconfig: pytest.Config) -> Iterator[str]:
    """Starts Ray on this machine, behind a token, without a dashboard; yields its address."""
    import ray

    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=200 * 1024 * 1024,
        _temp_dir=str(pytestconfig.stash[RAY_FOLDER]),
        _node_ip_address="127.0.0.1",
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    def wait(condition: Callable[[], bool], *, what: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
            time.sleep(0.005)

    return wait
