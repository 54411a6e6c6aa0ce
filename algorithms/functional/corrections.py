"""What is done about tokens that another distribution sampled: importance weights ρ = π_old / μ, and OPSM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from algorithms.functional.aggregation import mean_of_samples, sum_of_samples
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
    """``[tokens]`` weights of the policy loss, detached, and ``[tokens]`` bool: where ρ lay outside of [low, high].

    ``level`` "token": ρ_t = π_old / μ of the token; "sequence": the product over its sample's trained tokens;
    "geometric": their geometric mean, exp(mean of log ρ_t). ``method`` "tis" clamps ρ to [low, high] (truncated
    importance sampling), and so does "tis_normalized", whose division by the mean is `divide_by_mean_weight`; "mis" and
    "icepop" keep ρ inside and give 0 outside (masked importance sampling; IcePop is its token-level form). A masked
    token has weight 1.
    """
    log_ratio = masked_log_ratio(old_logprobs, rollout_logprobs, loss_mask).detach()
    if level in ("sequence", "geometric"):
        over_sample = sum_of_samples if level == "sequence" else mean_of_samples
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
    """A group's correction weights ``[tokens]`` as they count in a mean, float64: those of its trained tokens where
    ``level`` is "token", else one of each sample that has a trained token."""
    counted, ids = weights[loss_mask].double(), sample_ids[loss_mask]
    if level == "token":
        return counted
    lengths = counted.new_zeros(num_samples).index_add(0, ids, counted.new_ones(counted.shape))
    sums = counted.new_zeros(num_samples).index_add(0, ids, counted)
    return (sums / lengths)[lengths > 0]


def divide_by_mean_weight(*, advantages: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Self-normalised importance sampling: advantages over the mean correction weight of a train step, float32.

    Every policy loss here is proportional to the size of its advantages. So this divides the weights themselves by
    their mean, also where a micro-batch or a rank sees only a part of the step. ``advantages``: one ``[tokens]`` tensor
    a group; ``weights``: one tensor a group from `weights_to_average`. Without a trained token nothing changes.
    """
    import torch  # here, because the settings are checked in processes that have no torch

    every = torch.cat(list(weights))
    if every.numel() == 0:
        return list(advantages)
    return [(values.double() / every.mean()).float() for values in advantages]


def kept_by_opsm(
    *, log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, sample_ids: Tensor, num_samples: int, threshold: float
) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9): ``[tokens]`` bool, False where the token is
    left out.

    Left out are tokens with a negative advantage of samples whose mean log μ - log π is above ``threshold``. μ is what
    the engine sampled with, so the drift counts both its age and the engine's own rounding. ``log_ratio`` ``[tokens]``
    is log π - log μ.
    """
    drift = -mean_of_samples(
        per_token=log_ratio.detach(), loss_mask=loss_mask, sample_ids=sample_ids, num_samples=num_samples
    )
    return ~((drift > threshold)[sample_ids] & (advantages < 0))
