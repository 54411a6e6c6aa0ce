"""Checks the keys of environments of several turns: their worker processes, and rollout.lockstep."""

from __future__ import annotations

from collections.abc import Iterator

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.env import EnvSpec

EVALUATED_TOGETHER = 256  # episodes of an evaluation that are open together (rollout/evaluation/played_sets.py)


def env_worker_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields what is wrong with the keys of an environment whose episodes run in worker processes."""
    env = config.env
    for key, what in (("workers", "one worker process"), ("episodes_per_worker", "one episode a worker process")):
        if getattr(env, key) < 1:
            yield f"env.{key}={getattr(env, key)}: at least {what}."
    if not env.worker_memory_gib > 0:
        yield f"env.worker_memory_gib={env.worker_memory_gib}: must be more than 0 GiB."
    if env.workers < 1 or env.episodes_per_worker < 1:
        return
    for key, size in (("algo.group_size", config.algo.group_size), ("eval.samples", config.eval.samples)):
        if env.workers * env.episodes_per_worker < size:
            yield _too_few_places(env, f"{key}={size} are open together", needed=size)
    if config.rollout.lockstep:
        # The episodes of a step, and beside them those of the next step or of the evaluation before it.
        step = config.rollout.prompts_per_step * config.algo.group_size
        needed = step + max(step, EVALUATED_TOGETHER if config.eval.every else 0)
        if env.workers * env.episodes_per_worker < needed:
            yield _too_few_places(env, f"with rollout.lockstep=true up to {needed} are open together", needed=needed)


def _too_few_places(env: object, why: str, *, needed: int) -> str:
    workers, each = env.workers, env.episodes_per_worker  # type: ignore[attr-defined]
    return (
        f"env.workers={workers} with env.episodes_per_worker={each}: they have room for {workers * each} episodes, and "
        f"{why}. Use env.workers={-(-needed // each)}."
    )


def lockstep_problems(config: RelaxConfig, env: EnvSpec) -> Iterator[str]:
    """Yields why rollout.lockstep=true makes no sense: bits depend on timing in spite of it, or not even without it."""
    rollout = config.rollout
    if not env.has_turns:
        yield f"rollout.lockstep=true with env={env.name}, whose episodes have one turn. Use false."
    for key, value, most, what in (
        ("mode.max_staleness", config.mode.max_staleness, 0, "the weights that make a turn depend"),
        ("rollout.workers", rollout.workers, 1, "the groups that a worker plays depend"),
        ("rollout.over_sampling", rollout.over_sampling, 1, "the groups that are trained depend"),
    ):
        if value > most:
            yield f"rollout.lockstep=true with {key}={value:g}: {what} on timing. Use {key}={most}, or no lockstep."
    if 0 < rollout.quorum < 1:
        yield (
            f"rollout.lockstep=true with rollout.quorum={rollout.quorum:g}: the episodes that are trained depend on "
            "timing. Use rollout.quorum=1, or no lockstep."
        )
