from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from relax_core.config.compose import load_config
from relax_core.roles.placement import LOOPBACK, node_address, node_options, rank_bundles, rank_options, reserve_ranks


def test_a_ray_of_our_own_stays_on_loopback_and_binds_nobody_to_cores() -> None:
    launcher = load_config().launcher
    assert node_address(launcher) == LOOPBACK
    assert node_options(launcher, "engine", 1) == {"num_cpus": 0}


def test_ranks_take_a_gpu_each_or_nearly_nothing() -> None:
    placement = load_config().placement
    assert sum(bundle["CPU"] for bundle in rank_bundles(placement, 64)) < 1
    gpus = [bundle["GPU"] for bundle in rank_bundles(replace(placement, gpus_per_node=8), 4)]
    assert gpus == [1.0] * 4


@pytest.mark.parametrize("ray_address", [None, "auto"])  # a Ray of our own; one that was joined
def test_more_ranks_than_cores_start(ray_session: str, ray_address: str | None) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    config = load_config()
    ranks = 2 * int(ray.cluster_resources()["CPU"])
    launcher = replace(config.launcher, ray_address=ray_address)
    group = reserve_ranks(launcher, config.placement, ranks)
    assert group.wait(timeout_seconds=120)
    remote: Any = ray.remote(Rank)
    last = remote.options(**rank_options(config.placement, group, ranks - 1)).remote()
    assert ray.get(last.group.remote(), timeout=120) == group.id.hex()
    remove_placement_group(group)


class Rank:
    def group(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_placement_group_id())
