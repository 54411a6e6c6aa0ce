"""Derives the sampling parameters of training and evaluation from the configuration."""

from __future__ import annotations

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.engine import SamplingParams
from relax_core.data.tokenizer import PromptTokenizer


def training_sampling(config: RelaxConfig, tokenizer: PromptTokenizer) -> SamplingParams:
    """Returns the parameters of training: a group of samples per prompt, with the settings of ``rollout``."""
    rollout = config.rollout
    return SamplingParams(
        n=config.algo.group_size,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=tokenizer.stop_token_ids,
        banned_token_ids=config.rollout.banned(),
        return_routed_experts=config.algo.routing_replay,
        return_kept_tokens=rollout.truncates,
        stop=rollout.stop,
    )


def evaluation_sampling(config: RelaxConfig, tokenizer: PromptTokenizer) -> SamplingParams:
    """Returns the parameters of evaluation: greedy unless ``eval.temperature`` is set; no top-p, top-k and min-p."""
    return SamplingParams(
        n=config.eval.samples,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.eval.temperature,
        stop_token_ids=tokenizer.stop_token_ids,
        banned_token_ids=config.rollout.banned(),
        stop=config.rollout.stop,
    )
