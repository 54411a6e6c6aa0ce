"""Corrects for tokens that the engine sampled from another distribution, by importance weights and OPSM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from algorithms.functional.aggregation import sample_means, sample_sums
from algorithms.functional.ratios import MAX_LOG_RATIO, masked_log_ratio

if TYPE_CHECKING:
    from torch import Tensor

CORRECTIONS = ("tis", "tis_normalized", "mis", "icepop")
CORRECTION_LEVELS = ("token", "sequence", "geometric")


def correction_weights(
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sample_ids: Tensor,
    num_samples: int,
    method: str,
    level: str,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Returns detached weights of the policy loss (``[tokens]`` float) and a mask of ratios outside [low, high] (bool).

    The ratio of a token is ρ_t = π_old / μ, the trainer's probability divided by the engine's probability. ``level``
    selects the ratio: "token" is ρ_t, "sequence" the product of ρ over the sample's trained tokens, and "geometric" the
    geometric mean exp(mean of log ρ). ``method`` selects the treatment of ratios outside [low, high]. "tis" clamps the
    ratio to the interval (truncated importance sampling). "tis_normalized" also clamps the ratio;
    `divide_by_mean_weight` then divides by the mean. "mis" (masked importance sampling) and its token-level form
    "icepop" set the weight to 0. A token outside ``loss_mask`` has weight 1. Raises ValueError for an unknown
    ``method`` or ``level``.
    """
    log_ratio = masked_log_ratio(old_logprobs, rollout_logprobs, loss_mask).detach()
    if level in ("sequence", "geometric"):
        over_sample = sample_sums if level == "sequence" else sample_means
        of_samples = over_sample(
            per_token=log_ratio, loss_mask=loss_mask, sample_ids=sample_ids, num_samples=num_samples
        ).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_ratio = of_samples[sample_ids].masked_fill(~loss_mask, 0.0)
    elif level != "token":
        raise ValueError(f"correction level {level!r} is not one of {', '.join(CORRECTION_LEVELS)}")
    ratio = log_ratio.exp()
    outside = ((ratio < low) | (ratio > high)) & loss_mask
    if method in ("tis", "tis_normalized"):
        return ratio.clamp(low, high), outside
    if method in ("mis", "icepop"):
        return ratio.masked_fill(outside, 0.0), outside
    raise ValueError(f"correction {method!r} is not one of {', '.join(CORRECTIONS)}")


def weights_to_average(
    *, weights: Tensor, loss_mask: Tensor, sample_ids: Tensor, num_samples: int, level: str
) -> Tensor:
    """Returns the correction weights of one group for the mean over a step, float64.

    For ``level`` "token", these are the weights of the trained tokens. Otherwise there is one weight per sample with a
    trained token. ``weights`` is ``[tokens]``.
    """
    counted, ids = weights[loss_mask].double(), sample_ids[loss_mask]
    if level == "token":
        return counted
    lengths = counted.new_zeros(num_samples).index_add(0, ids, counted.new_ones(counted.shape))
    sums = counted.new_zeros(num_samples).index_add(0, ids, counted)
    return (sums / lengths)[lengths > 0]


def divide_by_mean_weight(*, advantages: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Divides the advantages by a train step's mean correction weight (self-normalised importance sampling).

    Every policy loss of this package is proportional to its advantages. So dividing the advantages has the effect of
    normalised weights, even if a micro-batch or rank has only a part of the step. ``advantages`` and the result have
    one ``[tokens]`` tensor per group; the result is float32. ``weights`` has one tensor of `weights_to_average` per
    group. If the step has no trained token, the advantages are unchanged.
    """
    import torch  # imported here, because settings are checked in processes that have no torch

    every = torch.cat(list(weights))
    if every.numel() == 0:
        return list(advantages)
    return [(values.double() / every.mean()).float() for values in advantages]


def opsm_mask(
    *, log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, sample_ids: Tensor, num_samples: int, threshold: float
) -> Tensor:
    """Returns False for tokens that off-policy sequence masking removes (DeepSeek-V3.2, arXiv 2512.02556, eq. 9).

    The result is ``[tokens]`` bool. A token is removed if its advantage is negative and its sample's mean of log μ -
    log π is above ``threshold``. ``log_ratio`` ``[tokens]`` is log π - log μ. μ is the engine's sampling distribution,
    so the difference includes stale weights and rounding in the engine.
    """
    drift = -sample_means(
        per_token=log_ratio.detach(), loss_mask=loss_mask, sample_ids=sample_ids, num_samples=num_samples
    )
    return ~((drift > threshold)[sample_ids] & (advantages < 0))
