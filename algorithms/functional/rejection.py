"""Rejection: tokens and whole samples that are left out because trainer and engine disagree too much about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from algorithms.functional.aggregation import mean_of_samples, sum_of_samples
from algorithms.functional.ratios import masked_log_ratio
from algorithms.functional.trust_region import probability_difference

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("token", "seq_sum", "seq_mean", "seq_any")
STATISTICS = ("ratio", "k1", "k2", "k3", "difference")
REJECTION_RULES = tuple(f"{reduction}_{statistic}" for reduction in REDUCTIONS for statistic in STATISTICS)


def kept_by_rejection(
    *,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sample_ids: Tensor,
    num_samples: int,
    rules: Mapping[str, Sequence[float]],
) -> Tensor:
    """``[tokens]`` bool, False where a rule leaves the token out; a masked token is kept. All inputs are detached.

    ``rules``: rule → (low, high), where ``low <= statistic <= high`` keeps. With ρ = π / μ of a token, the trainer's
    probability over the engine's, the statistics estimate KL(μ ‖ π) from μ's own tokens (Schulman 2020,
    "Approximating KL divergence"): k1 = -log ρ, k2 = (log ρ)² / 2, k3 = ρ - 1 - log ρ; ratio is ρ itself, difference is
    π - μ. "token_…" looks at each token and leaves it out alone. The others leave out the whole sample: "seq_sum_…"
    looks at the sum over its trained tokens (of the ratio: the product), "seq_mean_…" at their mean (of the ratio: the
    geometric mean), "seq_any_…" at every token: one outside is enough (a veto). Rules add up.
    """
    log_ratio = masked_log_ratio(logprobs, rollout_logprobs, loss_mask).detach()
    outside = loss_mask.new_zeros(loss_mask.shape)
    for rule, (low, high) in rules.items():
        reduction, _, statistic = rule.rpartition("_")
        if statistic == "ratio":  # in logs: a product of ratios is a sum there, and cannot overflow
            low, high = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
        values = _statistic(statistic, log_ratio, logprobs, rollout_logprobs, loss_mask)
        if reduction in ("seq_sum", "seq_mean"):
            over_sample = sum_of_samples if reduction == "seq_sum" else mean_of_samples
            values = over_sample(per_token=values, loss_mask=loss_mask, sample_ids=sample_ids, num_samples=num_samples)[
                sample_ids
            ]
        wrong = ((values < low) | (values > high)) & loss_mask
        if reduction == "seq_any":
            counts = sum_of_samples(
                per_token=wrong.float(), loss_mask=loss_mask, sample_ids=sample_ids, num_samples=num_samples
            )
            wrong = (counts > 0)[sample_ids] & loss_mask
        outside = outside | wrong
    return ~outside


def _statistic(name: str, log_ratio: Tensor, logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """``[tokens]``; of the ratio its log."""
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
