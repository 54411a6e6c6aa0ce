"""Variables that name a network interface are compared with those of this machine before a run starts."""

from __future__ import annotations

import pytest

from relax_core.config.compose import load_config
from relax_core.preflight import interface_problems


@pytest.mark.parametrize(
    ("variable", "value", "wrong"),
    [
        ("GLOO_SOCKET_IFNAME", "nic9", True),
        ("GLOO_SOCKET_IFNAME", "lo,nic9", True),
        ("GLOO_SOCKET_IFNAME", "lo", False),
        ("TP_SOCKET_IFNAME", "nic9", True),
        ("NCCL_SOCKET_IFNAME", "nic9", True),
        ("NCCL_SOCKET_IFNAME", "l", False),  # a prefix
        ("NCCL_SOCKET_IFNAME", "=l", True),
        ("NCCL_SOCKET_IFNAME", "=lo:4791", False),
        ("NCCL_SOCKET_IFNAME", "^docker", False),
        ("NCCL_SOCKET_IFNAME", "", False),
    ],
)
def test_an_interface_that_does_not_exist_is_named(
    variable: str, value: str, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    problems = list(interface_problems(load_config()))
    assert bool(problems) is wrong
    assert all(f"{variable}={value}" in one and "lo" in one for one in problems)
    assert not list(interface_problems(load_config(["launcher.ray_address=head:6379"])))
