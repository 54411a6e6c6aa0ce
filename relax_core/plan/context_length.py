"""Derives `engine.context_length` if it is not set, and `engine.prefix_cache_tokens`.

The context has room for the longest prompt, the response, and the env's longest observation after each turn except the
last. The prefix cache has room for `KEPT_GROUPS` groups of the longest episodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

from relax_core.config.choices import LauncherKind
from relax_core.config.engine_checks import offline_rows
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.env import InteractionConfig
from relax_core.data.eval_sets import eval_sets_alone
from relax_core.plan.data_check import reuse_summary, summarize_data
from relax_core.plan.prompt_maker import positions, prompt_maker
from relax_core.plan.threads import with_threads
from relax_core.registry import PluginError, find_engine, find_env
from relax_core.rollout.evaluator import prepare
from relax_core.rollout.prompt_tokens import PromptMaker

ROUND_TO = 64  # tokens; a derived context and the embedded engine's cache are multiples of it
KEPT_GROUPS = 4  # groups of the longest episodes; an engine keeps their keys and values between turns
UNKNOWN_PROMPT = 512  # assumed tokens of an env's first prompt, and of a prompt without data or tokenizer

Longest = Callable[[RelaxConfig, PromptMaker], int]  # returns the tokens of a prompt; raises ValueError or OSError


def settle_context(config: RelaxConfig) -> tuple[RelaxConfig, list[str]]:
    """Returns the configuration with the derived context, and the problems of the model's tokenizer.

    Problems with the data are not returned, because the data check reports them. A job on another cluster derives the
    context on that cluster, which has the files.
    """
    settled, problems = _settle(config, lambda unsettled, _: summarize_data(unsettled).bound)
    reuse_summary(config, settled)
    return settled, problems


def settle_evaluation_context(config: RelaxConfig) -> tuple[RelaxConfig, list[str]]:
    """Works like `settle_context` for an evaluation without training, with the prompts of the evaluation sets."""
    return _settle(config, _longest_asked)


def planned_context(config: RelaxConfig) -> RelaxConfig:
    """Works like `settle_context` for a plan only; prompts on another cluster have `UNKNOWN_PROMPT` tokens."""
    return with_threads(_with_context(settle_context(config)[0], UNKNOWN_PROMPT))


def _settle(config: RelaxConfig, longest: Longest) -> tuple[RelaxConfig, list[str]]:
    if config.launcher.name is LauncherKind.ray_job or config.rollout.max_new_tokens < 1:
        return config, []
    if isinstance(config.env, InteractionConfig) and config.env.max_turns < 1:
        return config, []
    settled, problems = _settle_length(config, longest)
    return with_threads(_with_prefix_cache(settled)), problems


def _settle_length(config: RelaxConfig, longest: Longest) -> tuple[RelaxConfig, list[str]]:
    try:
        prompts = prompt_maker(config)
    except ValueError as error:
        return _with_context(config, UNKNOWN_PROMPT), [str(error)]
    if find_env(config.env.name).agent is not None and config.engine.context_length is None:
        message = (
            f"engine.context_length=null with env.name={config.env.name}: the length of an episode is not "
            "known. Give the tokens of the longest episode, rollout.max_new_tokens of its last turn included, e.g. "
            "engine.context_length=512."
        )
        return _with_context(config, UNKNOWN_PROMPT), [message]
    if prompts is None:
        return _with_context(config, UNKNOWN_PROMPT), []
    if config.engine.context_length is not None:
        return config, []
    try:
        tokens = longest(config, prompts)
    except (ValueError, OSError):  # the data check reports it
        tokens = 0
    return _with_context(config, tokens or UNKNOWN_PROMPT), []


def _longest_asked(config: RelaxConfig, prompts: PromptMaker) -> int:
    sets = [prepare(eval_set, prompts, max_bad=config.data.max_bad_rows) for eval_set in eval_sets_alone(config)]
    return max((len(row.input_ids) for eval_set in sets for row in eval_set.rows), default=0)


def _with_context(config: RelaxConfig, prompt_tokens: int) -> RelaxConfig:
    if config.engine.context_length is not None:
        return config
    wanted = prompt_tokens
    if offline_rows(config) is None:  # a data row for training without engines has its answers
        wanted += config.rollout.max_new_tokens + _observed(config)
    wanted = -(-wanted // ROUND_TO) * ROUND_TO
    context = min(wanted, positions(config) or wanted)
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, context_length=context))


def _observed(config: RelaxConfig) -> int:
    """Returns the maximum number of observation tokens after all turns except the last; 0 for an agent."""
    env = find_env(config.env.name)
    if not env.has_turns or env.agent is not None:
        return 0
    return cast(InteractionConfig, config.env).max_observed_tokens


def _with_prefix_cache(config: RelaxConfig) -> RelaxConfig:
    """Returns the configuration with the derived prefix cache.

    Single-turn prompts share too little for a prefix cache.
    """
    engine = config.engine
    try:
        keys = find_engine(engine.name).keys
    except PluginError:  # the engine check reports it
        return config
    if engine.prefix_cache_tokens is not None or "prefix_cache_tokens" not in keys:
        return config
    tokens = 0
    if find_env(config.env.name).has_turns:
        tokens = min(KEPT_GROUPS * config.algo.group_size * engine.context_tokens, engine.max_total_tokens)
    return dataclasses.replace(config, engine=dataclasses.replace(engine, prefix_cache_tokens=tokens))
