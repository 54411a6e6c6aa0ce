"""Says which roles a run has and how many workers each role has.

The services and the plan use it.
"""

from __future__ import annotations

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.algorithm import Requirements
from relax_core.registry import find_algorithm
from relax_core.roles.process.role_context import JUDGE_ENGINE, TEACHER_ENGINE, worker_name
from relax_core.rollout.group_advantages import computes_advantages_per_group
from relax_core.rollout.judges.judge_choice import judge_engines
from relax_core.train.parallel_layout import FORWARD_ROLES, Layout, equal_ranks, world_size


def roles_of(config: RelaxConfig) -> dict[str, int]:
    """Returns role → number of workers, in the order in which they start. The role with the slowest start is first."""
    requirements: Requirements = find_algorithm(config.algo.name).requirements(config.algo)
    layouts = worker_group_layouts(config)
    roles = {"actor": world_size(layouts["actor"]), "engine": config.engine.count, "rollout": config.rollout.workers}
    if requirements.critic:
        roles["critic"] = 1
    roles |= {role: world_size(layouts[role]) for role in FORWARD_ROLES if role in layouts}
    if requirements.teacher is not None:
        roles["teacher"] = 1
        if requirements.teacher.served_by == "engine":
            roles[TEACHER_ENGINE] = len(requirements.teacher.models)
    if judges := len(judge_engines(config)):
        roles[JUDGE_ENGINE] = judges
    if not computes_advantages_per_group(config):
        roles["advantages"] = 1
    return roles


def equal_trainers(config: RelaxConfig) -> list[list[str]]:
    """Returns the names of the trainer's ranks, those together that do the same work."""
    return [[worker_name("actor", rank) for rank in ranks] for ranks in equal_ranks(config.parallel)]


def worker_group_layouts(config: RelaxConfig) -> dict[str, Layout]:
    """Returns role → layout for the roles whose workers are the ranks of one model."""
    requirements: Requirements = find_algorithm(config.algo.name).requirements(config.algo)
    layouts: dict[str, Layout] = {"actor": config.parallel}
    if requirements.old_logprobs == "actor_fwd":
        layouts["actor_fwd"] = config.parallel.forward
    if requirements.reference:
        layouts["reference"] = config.parallel.forward
    return layouts


def layout_key(role: str) -> str:
    """Returns the configuration key of the layout of a role of `worker_group_layouts`."""
    return "parallel" if role == "actor" else "parallel.forward"
