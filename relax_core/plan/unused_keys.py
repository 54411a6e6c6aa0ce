"""Finds settings that have no effect in a configuration or in an evaluation."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from relax_core.config.choices import OnStale, Partial, Schedule, Surplus
from relax_core.config.reward_choice import may_be_isolated
from relax_core.config.schema import RelaxConfig
from relax_core.roles.process_placement import forward_columns, worker_group_layouts
from relax_core.train.parallel_layout import FORWARD_ROLES, world_size

# Keys that only training reads. All keys of `optimizer` belong to them, too.
_TRAINING = (
    "mode",
    "resume",
    "run.steps",
    "run.epochs",
    "run.save_every",
    "run.keep_best",
    "run.patience",
    "eval.every",
)


def unused_keys(config: RelaxConfig) -> Iterator[str]:
    """Yields "keys: reason" for settings that have no effect in a validated configuration."""
    algo: Any = config.algo
    if getattr(algo, "kl_coef", None) == 0.0:
        yield "algo.kl_estimator, algo.kl_placement: algo.kl_coef=0 uses no reference model"
    if getattr(algo, "aggregation", None) in ("token_mean", "seq_mean_token_mean"):
        yield f"algo.norm_length: algo.aggregation={algo.aggregation} does not divide by a length"
    if getattr(algo, "credit", None) == "episode":
        yield "algo.gigpo_weight, algo.gigpo_gamma: algo.credit=episode compares no turns"
    if not may_be_isolated(config.reward):
        yield f"rollout.reward_workers: reward={config.reward.name} runs in the rollout process"
    if config.optimizer.schedule is Schedule.constant:
        yield "optimizer.min_lr_ratio: optimizer.schedule=constant never lowers the learning rate"
    yield from _unread_of_rollout(config)
    if not config.eval.every:
        yield "eval.rows, eval.samples, eval.temperature, eval.sets: eval.every=0 never evaluates"
    if config.data.task is None:
        yield "data.size: a file has a fixed number of rows"
    yield from _unread_layouts(config)
    if config.model.path is not None and config.model.shape is not None:
        yield "model.shape: the folder of model.path has the dimensions"


def warn_of_unused(unused: Iterable[str], overrides: Sequence[str]) -> None:
    """Prints a warning for each override with a key in ``unused``, the lines of `unused_keys`."""
    values = dict(word.lstrip("+").split("=", 1) for word in overrides if "=" in word)
    for line in unused:
        keys, _, why = line.partition(": ")
        for key in keys.split(", "):
            if key in values:
                print(f"relax: warning: {key}={values[key]} is not read: {why}.", file=sys.stderr)


def _unread_layouts(config: RelaxConfig) -> Iterator[str]:
    parallel = config.parallel
    if parallel.dp * parallel.cp == 1 and parallel.distributed_optimizer:
        yield "parallel.distributed_optimizer: with parallel.dp=1 and cp=1 no other rank can store a part"
    if not set(FORWARD_ROLES) & set(worker_group_layouts(config)) and world_size(parallel.forward) > 1:
        why = "with these settings the algorithm starts neither actor_fwd nor the reference"
        if forward_columns(config):
            why = "with placement.forward=actor the actor's ranks compute these log-probs"
        yield f"parallel.forward: {why}"


def _unread_of_rollout(config: RelaxConfig) -> Iterator[str]:
    rollout = config.rollout
    over_sampled = rollout.over_sampling > 1.0
    if not over_sampled and rollout.surplus is not Surplus.drop:
        yield "rollout.surplus: rollout.over_sampling=1 generates no surplus"
    if config.mode.max_staleness == 0 and not (over_sampled and rollout.surplus is Surplus.keep):
        why = "with mode.max_staleness=0 no weight change happens during a sample"
        if config.mode.on_stale is not OnStale.drop:
            yield f"mode.on_stale: {why}"
        if rollout.partial is not Partial.in_place:
            yield f"rollout.partial: {why}"
        if rollout.mask_off_policy:
            yield f"rollout.mask_off_policy: {why}"


def unread_by_evaluation(overrides: Sequence[str]) -> Iterator[str]:
    """Yields a sentence for each override of a key that an evaluation does not read."""
    for word in overrides:
        key, _, value = word.partition("=")
        if key == "plan" and value != "false":
            yield f"{word}: relax eval has no plan. Drop it; plan=true belongs to a run."
        elif key in _TRAINING or key.startswith(("optimizer.", "mode.")):
            yield f"{word}: an evaluation does not train, and does not read {key}. Drop it."
