"""The maths that policy-gradient algorithms share: pure functions on flat float32 token tensors.

Shapes: ``[tokens]`` is every response token of a micro-batch, ``[samples]`` one entry a sample. A masked token has no
influence on any value or gradient, also where its log-probs are not finite. Log-ratios are clamped to ±20 before
`exp`, so nothing overflows; beyond the clamp the gradient is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.contracts.algorithm import StepTotals

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")
KL_ESTIMATORS = ("k1", "k2", "k3")
MAX_LOG_RATIO = 20.0


def group_relative_advantages(*, rewards: Tensor, normalize_std: bool, std_epsilon: float) -> Tensor:
    """``[samples]`` rewards of one group → ``[samples]`` advantages, float32.

    ``(r - mean) / (std + std_epsilon)`` with the unbiased std (GRPO); without ``normalize_std`` only ``r - mean``
    (Dr. GRPO). Equal rewards give exactly 0. Raises ValueError for a group of one, which has no baseline.
    """
    if rewards.numel() < 2:
        raise ValueError(f"a group of {rewards.numel()} has no baseline: group-relative advantages need 2 or more")
    if bool((rewards == rewards[0]).all()):  # rounding of the mean would be blown up by the tiny std
        return rewards.new_zeros(rewards.shape).float()
    values = rewards.double()
    centred = values - values.mean()
    if normalize_std:
        centred = centred / (values.std(correction=1) + std_epsilon)
    return centred.float()


class PolicyLoss(NamedTuple):
    """Per token ``[tokens]``: the loss, and the log of the ratio π/π_old (0 at masked tokens) and the ratio itself."""

    per_token: Tensor
    log_ratio: Tensor
    ratio: Tensor


def clipped_policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347) with a lower and an upper range; all inputs ``[tokens]``."""
    log_ratio = masked_log_ratio(logprobs, old_logprobs, loss_mask)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token = -(ratio * advantages).minimum(clipped * advantages)
    return PolicyLoss(per_token, log_ratio, ratio)


def masked_log_ratio(numerator: Tensor, denominator: Tensor, loss_mask: Tensor) -> Tensor:
    """``numerator - denominator`` of two log-probs ``[tokens]``, clamped; 0 without gradient where masked."""
    return (numerator - denominator).masked_fill(~loss_mask, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(*, logprobs: Tensor, reference_logprobs: Tensor, loss_mask: Tensor, estimator: str) -> Tensor:
    """Per-token estimate ``[tokens]`` of KL(π ‖ π_ref), with x = log π - log π_ref: k1 = x, k2 = x²/2,
    k3 = e^-x + x - 1 (never negative). As a loss, k1 has zero expected gradient on policy."""
    x = masked_log_ratio(logprobs, reference_logprobs, loss_mask)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return 0.5 * x.square()
    if estimator == "k3":
        return (-x).expm1() + x
    raise ValueError(f"KL estimator {estimator!r} is not one of {', '.join(KL_ESTIMATORS)}")


def truncated_importance_weights(
    *, old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, low: float, high: float
) -> Tensor:
    """``[tokens]`` weights clamp(π_old / μ, low, high) that correct for the engine's own distribution μ. Detached."""
    return masked_log_ratio(old_logprobs, rollout_logprobs, loss_mask).exp().clamp(low, high).detach()


def aggregate_sum(
    *,
    per_token: Tensor,
    loss_mask: Tensor,
    sample_ids: Tensor,
    num_samples: int,
    aggregation: str,
) -> Tensor:
    """The numerator of the step's loss, a scalar; `aggregate_denominator` has the other half.

    ``per_token`` ``[tokens]`` float; ``sample_ids`` ``[tokens]`` int64 in 0..num_samples-1. ``token_mean`` and
    ``seq_mean_token_sum_norm`` sum the tokens; ``seq_mean_token_mean`` sums each sample's mean.
    """
    masked = per_token.masked_fill(~loss_mask, 0.0)
    if aggregation != "seq_mean_token_mean":
        return masked.sum()
    lengths = masked.new_zeros(num_samples).index_add(0, sample_ids, loss_mask.to(masked.dtype))
    return (masked / lengths.clamp(min=1.0)[sample_ids]).sum()


def aggregate_denominator(*, totals: StepTotals, aggregation: str, norm_length: float) -> float:
    """What the whole step's numerator is divided by: trained tokens, samples, or samples × ``norm_length`` tokens.

    ``norm_length`` (tokens) is the constant of Dr. GRPO (arXiv 2503.20783); only ``seq_mean_token_sum_norm`` reads it.
    Never 0: a step without one trained token has loss 0.
    """
    if aggregation == "token_mean":
        return float(max(totals.tokens, 1))
    if aggregation == "seq_mean_token_mean":
        return float(max(totals.samples, 1))
    if aggregation == "seq_mean_token_sum_norm":
        return max(totals.samples, 1) * norm_length
    raise ValueError(f"aggregation {aggregation!r} is not one of {', '.join(AGGREGATIONS)}")
