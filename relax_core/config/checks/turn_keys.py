"""Checks the keys of environments of several turns: their worker processes, and rollout.lockstep."""

from __future__ import annotations

from collections.abc import Iterator

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.env import EnvSpec
from relax_core.registry import find_algorithm, find_env

EVALUATED_TOGETHER = 256  # episodes of an evaluation that are open together (rollout/evaluation/played_sets.py)


def turn_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields what is wrong with the keys of an environment with several turns."""
    env, plugin_config, quorum = find_env(config.env.name), config.env, config.rollout.quorum
    if not env.state_keys and find_algorithm(config.algo.name).requirements(config.algo).state_keys:
        yield (
            f"algo.credit=gigpo with env={env.name}, which gives no state_key, so that no turns of equal states can be "
            "compared. Use algo.credit=episode, or an env whose SPEC has state_keys=True and whose steps give one."
        )
    if config.rollout.lockstep:
        yield from lockstep_problems(config, env)
    if not env.has_turns:
        if 0 < quorum < 1:
            yield f"rollout.quorum={quorum:g} with env={env.name}, whose episodes have one turn. Use 1.0."
        return
    if (size := config.algo.group_size) > 1 and 0 < quorum * size <= 1:
        yield (
            f"rollout.quorum={quorum:g} leaves a single episode of algo.group_size={size}, which has nothing to be "
            f"compared with. Use at least {2 / size:.2g}."
        )
    if plugin_config.max_turns < 1:
        yield f"env.max_turns={plugin_config.max_turns}: an episode has at least one turn."
    if plugin_config.max_retries < 0:
        yield f"env.max_retries={plugin_config.max_retries}: must be at least 0 new starts."
    if (limit := plugin_config.max_turn_tokens) is not None and limit < 1:
        yield f"env.max_turn_tokens={limit}: must be at least 1 token."
    if (value := plugin_config.tools_as) not in ("template", "text"):
        yield f"env.tools_as={value}: use template or text."
    if env.open is not None:
        yield from _interaction_problems(config)
    if env.isolated:
        yield from env_worker_problems(config)


def _interaction_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields what is wrong with the keys of an environment that answers each response."""
    env = config.env
    limit, context = env.max_observation_tokens, config.engine.context_length
    if limit is not None and limit < 1:
        yield f"env.max_observation_tokens={limit}: must be at least 1 token."
    if limit is not None and context is not None and limit > context:
        yield (
            f"env.max_observation_tokens={limit} is above engine.context_length={context}, so an observation that is "
            f"cut there leaves no room for an answer. Use {max(1, context // 4)}, or raise engine.context_length."
        )
    for key in ("step_timeout_s", "episode_timeout_s"):
        if not getattr(env, key) > 0:
            yield f"env.{key}={getattr(env, key)}: must be more than 0 seconds."
    if env.on_turn_cut not in ("end", "continue"):
        yield f"env.on_turn_cut={env.on_turn_cut}: use end or continue."


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
    if env.agent is not None:
        yield f"rollout.lockstep=true with env={env.name}: when agents ask depends on timing. Use false."
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
