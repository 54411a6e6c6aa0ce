"""What all tests share: one small local Ray for the whole session."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_session() -> Iterator[str]:
    """Starts Ray on this machine, behind a token, without a dashboard; yields its address."""
    import ray

    # Short: Ray's socket paths lie below it and may have 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="rx", dir="/tmp"))
    token_path = folder / "token"
    token_path.touch(mode=0o600)
    token_path.write_text(secrets.token_hex(32))
    settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)}
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        context = ray.init(
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=200 * 1024 * 1024,
            _temp_dir=str(folder),
            _node_ip_address="127.0.0.1",
        )
        yield context.address_info["address"]
    finally:
        ray.shutdown()
        for key, value in before.items():
            if value is None:
                os.environ.pop(key)
            else:
                os.environ[key] = value
        shutil.rmtree(folder, ignore_errors=True)
