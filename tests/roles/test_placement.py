from __future__ import annotations

from relax_core.config.compose import load_config
from relax_core.roles.placement import LOOPBACK, node_address, node_options


def test_a_ray_of_our_own_stays_on_loopback_and_binds_nobody_to_cores() -> None:
    launcher = load_config().launcher
    assert node_address(launcher) == LOOPBACK
    assert node_options(launcher, "engine", 1) == {"num_cpus": 0}
