"""Which roles a run has, and how many workers each: asked by the services that start them, and by the plan."""

from __future__ import annotations

from relax_core.contracts.algorithm import Needs
from relax_core.roles.context import TEACHER_ENGINE


def roles_of(needs: Needs, *, engines: int) -> dict[str, int]:
    """Role → how many workers it has, in the order in which they are started: the slowest to start first."""
    roles = {"actor": 1, "engine": engines, "rollout": 1}
    if needs.critic:
        roles["critic"] = 1
    if needs.old_logprobs == "actor_fwd":
        roles["actor_fwd"] = 1
    if needs.reference:
        roles["reference"] = 1
    if needs.teacher is not None:
        roles["teacher"] = 1
        if needs.teacher.served_by == "engine":
            roles[TEACHER_ENGINE] = len(needs.teacher.models)
    roles["advantages"] = 1
    return roles
