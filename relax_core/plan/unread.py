"""Knobs that nothing reads in this very configuration: changing them changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relax_core.config.schema import OnStale, RelaxConfig, Schedule
from relax_core.registry import find_reward


def unread_knobs(config: RelaxConfig) -> Iterator[str]:
    """ "key: why", for a validated configuration."""
    algo: Any = config.algo
    if getattr(algo, "kl_coef", None) == 0.0:
        yield "algo.kl_estimator, algo.kl_placement: algo.kl_coef=0 asks for no reference model"
    if getattr(algo, "aggregation", None) in ("token_mean", "seq_mean_token_mean"):
        yield f"algo.norm_length: algo.aggregation={algo.aggregation} does not divide by it"
    if not find_reward(config.reward.name).isolated:
        yield f"rollout.reward_workers: reward={config.reward.name} runs in the rollout process itself"
    if config.optimizer.schedule is Schedule.constant:
        yield "optimizer.min_lr_ratio: optimizer.schedule=constant never goes down"
    if config.mode.max_staleness == 0 and config.mode.on_stale is not OnStale.drop:
        yield "mode.on_stale: with mode.max_staleness=0 nothing gets stale"
    if not config.eval.every:
        yield "eval.rows: eval.every=0 never evaluates"
    if config.data.path is not None or config.data.task is None:
        yield "data.size: a file has the rows that it has"
    if config.parallel.dp == 1 and config.parallel.distributed_optimizer:
        yield "parallel.distributed_optimizer: with parallel.dp=1 there is nobody to share with"
    if config.model.path is not None and config.model.shape is not None:
        yield "model.shape: model.path has dimensions of its own"
    if config.launcher.ray_address is not None:
        yield "launcher.ray_logical_cpus, launcher.object_store_mb: Ray runs already"
