"""Derives `engine.context_length` if it is not set, and `engine.prefix_cache_tokens`.

The context holds the longest prompt and a response, and the longest observations of an env after each turn except the
last; the prefix cache holds some groups of the longest episodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

from relax_core.config.choices import LauncherKind
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.env import InteractionConfig
from relax_core.data.eval_sets import eval_sets_alone
from relax_core.plan.data_check import reuse_summary, summarize_data
from relax_core.plan.prompt_maker import positions, prompt_maker
from relax_core.plan.threads import with_threads
from relax_core.registry import PluginError, find_engine, find_env
from relax_core.rollout.evaluator import prepare
from relax_core.rollout.prompt_tokens import PromptMaker

ROUND_TO = 64  # tokens; a derived context is a multiple of it, as is the embedded engine's cache
KEPT_GROUPS = 4  # groups of the longest episodes whose keys and values an engine keeps between their turns
UNKNOWN_PROMPT = 512  # tokens of an env's opening, and of a prompt if there is no data or no tokenizer yet

Longest = Callable[[RelaxConfig, PromptMaker], int]  # returns the tokens of a prompt; raises ValueError or OSError


def settle_context(config: RelaxConfig) -> tuple[RelaxConfig, list[str]]:
    """Returns the configuration with the derived context, and the problems of the model's tokenizer.

    Problems that other checks report, such as those of the data, are left to them. A job on another cluster derives the
    context there, where its files are.
    """
    settled, problems = _settle(config, lambda unsettled, _: summarize_data(unsettled).bound)
    reuse_summary(config, settled)
    return settled, problems


def settle_evaluation_context(config: RelaxConfig) -> tuple[RelaxConfig, list[str]]:
    """Does the work of `settle_context` for an evaluation without training, with the prompts of its sets."""
    return _settle(config, _longest_asked)


def planned_context(config: RelaxConfig) -> RelaxConfig:
    """Does the work of `settle_context` for a plan only; prompts on another cluster count as `UNKNOWN_PROMPT`."""
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
            f"engine.context_length=null with env.name={config.env.name}: how long its turns make a prompt is not "
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
    except (ValueError, OSError):  # the check of the data reports it
        tokens = 0
    return _with_context(config, tokens or UNKNOWN_PROMPT), []


def _longest_asked(config: RelaxConfig, prompts: PromptMaker) -> int:
    sets = [prepare(eval_set, prompts, max_bad=config.data.max_bad_rows) for eval_set in eval_sets_alone(config)]
    return max((len(row.input_ids) for eval_set in sets for row in eval_set.rows), default=0)


def _with_context(config: RelaxConfig, prompt_tokens: int) -> RelaxConfig:
    if config.engine.context_length is not None:
        return config
    wanted = prompt_tokens + config.rollout.max_new_tokens + _observed(config)
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
    """Returns the configuration with the derived prefix cache; single-turn prompts share too little for a cache."""
    engine = config.engine
    try:
        keys = find_engine(engine.name).keys
    except PluginError:  # the check of the engine's name reports it
        return config
    if engine.prefix_cache_tokens is not None or "prefix_cache_tokens" not in keys:
        return config
    tokens = 0
    if find_env(config.env.name).has_turns:
        tokens = min(KEPT_GROUPS * config.algo.group_size * engine.context_tokens, engine.max_total_tokens)
    return dataclasses.replace(config, engine=dataclasses.replace(engine, prefix_cache_tokens=tokens))
