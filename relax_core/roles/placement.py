"""Where a role's process runs: on which node of a joined Ray cluster, in which placement group; and by which address
others reach it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_core.config.schema import LauncherConfig, PlacementConfig
from relax_core.roles.context import TEACHER_ENGINE

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

LOOPBACK = "127.0.0.1"
A_LITTLE = 0.01  # Ray puts an actor that asks for nothing on any node, whatever its strategy says
ENGINE_ROLES = ("engine", TEACHER_ENGINE)


def node_address(launcher: LauncherConfig) -> str:
    """The IP address to listen on: loopback in a Ray of the run's own, else this node's own as the cluster knows it."""
    if launcher.ray_address is None:
        return LOOPBACK
    import ray

    return str(ray.util.get_node_ip_address())


def node_options(launcher: LauncherConfig, role: str, rank: int) -> dict[str, Any]:
    """Ray's options for a role's actor. Engines go to the nodes one after the other, the controller's node last; the
    rest stays with the controller. A process whose node is lost is started again wherever there is one."""
    if launcher.ray_address is None:
        return {"num_cpus": 0}
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    others = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
    nodes = [*others, here]
    chosen = nodes[rank % len(nodes)] if role in ENGINE_ROLES else here
    return {"num_cpus": A_LITTLE, "scheduling_strategy": NodeAffinitySchedulingStrategy(chosen, soft=True)}


def rank_bundles(placement: PlacementConfig, ranks: int) -> list[dict[str, float]]:
    """What the ranks of a role reserve together, all of it or nothing: a GPU each. Without GPUs nearly nothing, so that
    a laptop with fewer cores than ranks starts them all the same."""
    of_rank = {"CPU": A_LITTLE} | ({"GPU": 1.0} if placement.gpus_per_node else {})
    return [dict(of_rank) for _ in range(ranks)]


def reserve_ranks(launcher: LauncherConfig, placement: PlacementConfig, ranks: int) -> PlacementGroup:
    """The placement group of a role's ranks. Without GPUs they stay together on this node, else they are packed."""
    import ray
    from ray.util.placement_group import placement_group

    bundles = rank_bundles(placement, ranks)
    if launcher.ray_address is not None and not placement.gpus_per_node:
        here = f"node:{ray.util.get_node_ip_address()}"
        bundles = [bundle | {here: A_LITTLE} for bundle in bundles]
    return placement_group(bundles, strategy="PACK")


def rank_options(placement: PlacementConfig, group: PlacementGroup, rank: int) -> dict[str, Any]:
    """Ray's options for the actor of one rank in the group that `reserve_ranks` made."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    (bundle,) = rank_bundles(placement, 1)
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
    return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}
