"""Rejection sampling: masks tokens and whole samples if the log-probs of trainer and engine differ too much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from algorithms.functional.aggregation import sample_means, sample_sums
from algorithms.functional.ratios import masked_log_ratio
from algorithms.functional.trust_region import probability_difference

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("token", "seq_sum", "seq_mean", "seq_any")
STATISTICS = ("ratio", "k1", "k2", "k3", "difference")
REJECTION_RULES = tuple(f"{reduction}_{statistic}" for reduction in REDUCTIONS for statistic in STATISTICS)


def rejection_mask(
    *,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sample_ids: Tensor,
    num_samples: int,
    rules: Mapping[str, Sequence[float]],
) -> Tensor:
    """Returns False for tokens that a rule rejects, ``[tokens]`` bool. It is True for masked tokens.

    ``logprobs`` are the trainer's, ``rollout_logprobs`` the engine's log-probs, each ``[tokens]``. ``rules`` maps a
    name REDUCTION_STATISTIC to (low, high). A rule accepts values with low <= value <= high. A token is kept if all
    rules accept it. ρ = π / μ is the ratio of trainer and engine. The statistics are "ratio" ρ, "difference" π - μ, and
    the estimators of KL(μ ‖ π) from samples of μ (Schulman 2020, "Approximating KL divergence"): "k1" -log ρ, "k2" (log
    ρ)² / 2, "k3" ρ - 1 - log ρ.

    The reduction "token" checks and rejects single tokens. The other reductions reject whole samples: "seq_sum" checks
    the sum over the sample's trained tokens (for ratios the product), "seq_mean" the mean (for ratios the geometric
    mean), and "seq_any" rejects the sample if a single token is outside.
    """
    log_ratio = masked_log_ratio(logprobs, rollout_logprobs, loss_mask).detach()
    outside = loss_mask.new_zeros(loss_mask.shape)
    for rule, (low, high) in rules.items():
        reduction, _, statistic = rule.rpartition("_")
        if statistic == "ratio":  # ratios are compared as logs: a product becomes a sum and cannot overflow
            low, high = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
        values = _statistic(statistic, log_ratio, logprobs, rollout_logprobs, loss_mask)
        if reduction in ("seq_sum", "seq_mean"):
            over_sample = sample_sums if reduction == "seq_sum" else sample_means
            values = over_sample(per_token=values, loss_mask=loss_mask, sample_ids=sample_ids, num_samples=num_samples)[
                sample_ids
            ]
        wrong = ((values < low) | (values > high)) & loss_mask
        if reduction == "seq_any":
            counts = sample_sums(
                per_token=wrong.float(), loss_mask=loss_mask, sample_ids=sample_ids, num_samples=num_samples
            )
            wrong = (counts > 0)[sample_ids] & loss_mask
        outside = outside | wrong
    return ~outside


def _statistic(name: str, log_ratio: Tensor, logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns a statistic's values, ``[tokens]``. For "ratio", returns the log of the ratio."""
    if name == "ratio":
        return log_ratio
    if name == "k1":
        return -log_ratio
    if name == "k2":
        return 0.5 * log_ratio.square()
    if name == "k3":
        return log_ratio.expm1() - log_ratio
    if name == "difference":
        return probability_difference(logprobs, rollout_logprobs, loss_mask)
    raise ValueError(f"rejection statistic {name!r} is not one of {', '.join(STATISTICS)}")
