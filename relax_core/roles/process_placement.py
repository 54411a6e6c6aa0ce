"""Determines the roles of a run, the number of workers of each role, and the placement of the processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from relax_core.config.choices import ForwardRanks, ModeName, WeightTransportName
from relax_core.config.engine_checks import engine_count, offline_rows
from relax_core.config.schema import LauncherConfig, PlacementConfig, RelaxConfig
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import Requirements
from relax_core.contracts.media_file import node_folder
from relax_core.registry import find_algorithm, find_engine
from relax_core.roles.role_context import JUDGE_ENGINE, TEACHER_ENGINE, RunContext, worker_name
from relax_core.rollout.group_advantages import computes_advantages_per_group
from relax_core.rollout.judges.judge_choice import judge_engines, judge_plan
from relax_core.train.parallel_layout import FORWARD_ROLES, Layout, equal_ranks, world_size
from relax_core.weights.transport_choice import choose_transport

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

LOOPBACK = "127.0.0.1"
A_LITTLE = 0.01  # not 0, because Ray ignores the scheduling strategy of an actor that requests no resources
ENGINE_ROLES = ("engine", TEACHER_ENGINE, JUDGE_ENGINE)
ROLLOUT = "rollout"
MODEL_ROLES = ("actor", "critic", "actor_fwd", "reference", "teacher")  # roles with workers that run torch


def node_address(launcher: LauncherConfig) -> str:
    """Returns the IP address to listen on: loopback if the run started Ray, else this node's address in the cluster."""
    if launcher.ray_address is None:
        return LOOPBACK
    import ray

    return str(ray.util.get_node_ip_address())


def on_this_node(context: RunContext) -> RunContext:
    """Returns the context of a process on this node.

    In an external Ray cluster each node has a separate media folder.
    """
    if context.config.launcher.ray_address is None or context.media_folder is None:
        return context
    return replace(context, media_folder=node_folder(context.media_folder, node_id()))


def node_id() -> str:
    """Returns Ray's id of the node of this process."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def engines_take_gpus(config: RelaxConfig) -> bool:
    """Returns whether the engines that the run starts use GPUs.

    The embedded engine runs on CPU cores. The run reserves no devices for engines that are attached by URL.
    """
    on_gpus = config.placement.gpus_per_node > 0 and find_engine(config.engine.name).on_gpus
    return on_gpus and engine_count(config) > 0 and not config.engine.urls


def shares_gpus(config: RelaxConfig) -> bool:
    """Returns whether trainer and engines alternate on the same GPUs."""
    return config.mode.name is ModeName.colocate and engines_take_gpus(config)


def sends_factors(config: RelaxConfig) -> bool:
    """Returns whether a weight version has only LoRA factors, and engines read the base model once.

    Engines that release the memory of their weights, external engines and collective transports need whole tensors.
    """
    if not config.model.lora.rank or shares_gpus(config) or config.engine.urls:
        return False
    return choose_transport(config).name in (WeightTransportName.shared_memory, WeightTransportName.disk)


def judges_take_gpus(config: RelaxConfig) -> bool:
    """Returns whether each judge engine uses a GPU.

    All judges have the same kind of engine, as their check requires.
    """
    plan = judge_plan(config)
    kinds = (
        set()
        if plan is None
        else {judge.settings.engine for judge in plan.judges.values() if judge.settings.url is None}
    )
    return config.placement.gpus_per_node > 0 and any(find_engine(kind).on_gpus for kind in kinds)


def worker_gpus(config: RelaxConfig, role: str) -> int:
    """Returns the number of GPUs that one worker of a role reserves in Ray.

    An engine that shares the trainer's GPUs reserves none (`relax_core.roles.gpu_turns`).
    """
    if role == JUDGE_ENGINE:
        return int(judges_take_gpus(config))
    if role in ENGINE_ROLES:
        return config.engine.tp if engines_take_gpus(config) and not shares_gpus(config) else 0
    return int(config.placement.gpus_per_node > 0 and role in MODEL_ROLES)


def node_options(launcher: LauncherConfig, role: str, rank: int, *, gpus: int = 0) -> dict[str, Any]:
    """Returns Ray's options for a role's actor.

    Engines are spread over the nodes, with the controller's node last. Rollout workers encode media on their node. They
    are spread with the controller's node first. All further processes run on the controller's node. After the loss of
    its node a process restarts on any node. Ray chooses the node of an actor that uses ``gpus``.
    """
    if gpus:
        return {"num_cpus": 0 if launcher.ray_address is None else A_LITTLE, "num_gpus": gpus}
    if launcher.ray_address is None:
        return {"num_cpus": 0}
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    other_nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
    nodes = [here]
    if role == ROLLOUT:
        nodes = [here, *other_nodes]
    elif role in ENGINE_ROLES:
        nodes = [*other_nodes, here]
    chosen = nodes[rank % len(nodes)]
    return {"num_cpus": A_LITTLE, "scheduling_strategy": NodeAffinitySchedulingStrategy(chosen, soft=True)}


def rank_bundles(placement: PlacementConfig, ranks: int) -> list[dict[str, float]]:
    """Returns the resources that a role's ranks reserve together: one GPU per rank.

    Without GPUs a rank reserves almost nothing, so all ranks can start on a laptop with fewer cores than ranks.
    """
    of_rank = {"CPU": A_LITTLE} | ({"GPU": 1.0} if placement.gpus_per_node else {})
    return [dict(of_rank) for _ in range(ranks)]


def reserve_ranks(launcher: LauncherConfig, placement: PlacementConfig, ranks: int) -> PlacementGroup:
    """Returns the placement group of a role's ranks. The group is packed; without GPUs it is on this node only."""
    import ray
    from ray.util.placement_group import placement_group

    bundles = rank_bundles(placement, ranks)
    if launcher.ray_address is not None and not placement.gpus_per_node:
        here = f"node:{ray.util.get_node_ip_address()}"
        bundles = [bundle | {here: A_LITTLE} for bundle in bundles]
    return placement_group(bundles, strategy="PACK")


def rank_options(placement: PlacementConfig, group: PlacementGroup, rank: int) -> dict[str, Any]:
    """Returns Ray's options for the actor of one rank in the group that `reserve_ranks` made."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    (bundle,) = rank_bundles(placement, 1)
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
    return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}


def cluster_fault(placement: PlacementConfig, nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns why an external Ray cluster is too small for the placement, or None.

    ``nodes`` comes from ``ray.nodes()``.
    """
    counts = [int(node.get("Resources", {}).get("GPU", 0)) for node in nodes if node["Alive"]]
    enough = sum(gpus >= placement.gpus_per_node for gpus in counts)
    if not placement.gpus_per_node or enough >= placement.nodes:
        return None
    return (
        f"placement.nodes={placement.nodes} with placement.gpus_per_node={placement.gpus_per_node}, and the nodes of "
        f"this Ray report {', '.join(map(str, counts))} GPUs. Start them with `ray start --num-gpus=N`, or lower the "
        "keys."
    )


# -- The roles of a run and the number of workers of each role --------------------------------------------------------


def roles_of(config: RelaxConfig) -> dict[str, int]:
    """Maps each role to its number of workers, in start order. The role with the slowest start is first.

    For an algorithm without engines, the workers of the role "rollout" make groups of data rows.
    """
    requirements: Requirements = find_algorithm(config.algo.name).requirements(config.algo)
    layouts = worker_group_layouts(config)
    roles = {"actor": world_size(layouts["actor"])}
    if engines := engine_count(config):
        roles["engine"] = engines
    roles["rollout"] = config.rollout.workers
    if requirements.critic:
        roles["critic"] = 1
    roles |= {role: world_size(layouts[role]) for role in FORWARD_ROLES if role in layouts}
    if requirements.teacher is not None:
        roles["teacher"] = 1
        if requirements.teacher.served_by == "engine":
            roles[TEACHER_ENGINE] = len(requirements.teacher.models)
    if offline_rows(config) is None and (judges := len(judge_engines(config))):
        roles[JUDGE_ENGINE] = judges
    if not computes_advantages_per_group(config) and c.ADVANTAGES not in actor_columns(config):
        roles["advantages"] = 1
    return roles


def equal_trainers(config: RelaxConfig) -> list[list[str]]:
    """Returns named groups of trainer ranks; the ranks of a group do the same work."""
    return [[worker_name("actor", rank) for rank in ranks] for ranks in equal_ranks(config.parallel)]


def worker_group_layouts(config: RelaxConfig) -> dict[str, Layout]:
    """Maps each role that runs the ranks of one model to its parallel layout."""
    layouts: dict[str, Layout] = {"actor": config.parallel}
    if not _forward_on_actor(config):
        layouts |= dict.fromkeys(forward_columns(config), config.parallel.forward)
    return layouts


def _forward_on_actor(config: RelaxConfig) -> bool:
    """Returns whether the actor's ranks compute the log-probs of actor_fwd and reference.

    With LoRA they always do, because they have the reference: the model without its factors. An algorithm on data rows
    publishes no weights, so no other process could compute the log-probs of actor_fwd.
    """
    requirements: Requirements = find_algorithm(config.algo.name).requirements(config.algo)
    unpublished = requirements.offline is not None and requirements.old_logprobs == "actor_fwd"
    return config.placement.forward is ForwardRanks.actor or config.model.lora.rank > 0 or unpublished


def forward_columns(config: RelaxConfig) -> dict[str, str]:
    """Maps actor_fwd and reference, if the algorithm needs them, to the columns with their log-probs."""
    requirements: Requirements = find_algorithm(config.algo.name).requirements(config.algo)
    columns = {}
    if requirements.old_logprobs == "actor_fwd":
        columns["actor_fwd"] = c.OLD_LOGPROBS
    if requirements.reference:
        columns["reference"] = c.REFERENCE_LOGPROBS
    return columns


def actor_columns(config: RelaxConfig) -> tuple[str, ...]:
    """Returns the columns that the actor's ranks compute before a train step (``placement.forward=actor``).

    They are the log-probs of actor_fwd and reference, and the advantages and returns, which may depend on them. The
    advantages of an algorithm on data rows are constant unless they need a whole train step.
    """
    logprobs = tuple(forward_columns(config).values())
    if not _forward_on_actor(config) or not logprobs:
        return ()
    if offline_rows(config) is not None and computes_advantages_per_group(config):
        return logprobs
    critic = find_algorithm(config.algo.name).requirements(config.algo).critic
    return (*logprobs, c.ADVANTAGES, *([c.RETURNS] if critic else []))


def layout_key(role: str) -> str:
    """Returns the configuration key of a role's layout in `worker_group_layouts`."""
    return "parallel" if role == "actor" else "parallel.forward"
