"""Tests the plan's warnings about this machine: too little shared memory, and missing network interfaces."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relax_core.config.compose import compose, typed_config
from relax_core.contracts.host_network import missing_interface
from relax_core.observe.process_usage import available_bytes
from relax_core.plan import build_plan
from relax_core.plan.build_plan import make_plan


def warnings(*overrides: str) -> list[str]:
    return list(make_plan(typed_config(compose(overrides))).warnings)


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "shm"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_available_memory_is_within_the_machine() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_shared_memory_that_is_too_small(small_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warnings() == []
    monkeypatch.setattr(build_plan, "SHARED_MEMORY", small_memory)
    (found,) = warnings()
    assert str(small_memory) in found and "1.0 MiB free" in found and "remount" in found
    monkeypatch.setattr(build_plan, "SHARED_MEMORY", small_memory / "missing")
    (found,) = warnings()
    assert "does not exist" in found


def test_an_interface_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth99")
    (found,) = warnings()
    assert "GLOO_SOCKET_IFNAME=lo,eth99" in found and "'eth99'" in found
    assert found == missing_interface("lo,eth99")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert warnings() == []


@pytest.mark.parametrize(("names", "wrong"), [("lo", False), ("^lo,docker", False), ("=l", True), ("ib", True)])
def test_interfaces_in_the_syntax_of_nccl(monkeypatch: pytest.MonkeyPatch, names: str, wrong: bool) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", names)
    assert not any("NCCL_SOCKET_IFNAME" in warning for warning in warnings()), "a run on CPUs does not use it"
    found = [warning for warning in warnings("placement=gpu") if f"NCCL_SOCKET_IFNAME={names}" in warning]
    assert bool(found) == wrong
