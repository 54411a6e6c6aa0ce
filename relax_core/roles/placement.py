"""On which node of a joined Ray cluster a role's process runs, and by which address others reach it."""

from __future__ import annotations

from typing import Any

from relax_core.config.schema import LauncherConfig
from relax_core.roles.context import TEACHER_ENGINE

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
