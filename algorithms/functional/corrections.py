"""What is done about tokens that another distribution sampled: importance weights ρ = π_old / μ, and OPSM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from algorithms.functional.aggregation import mean_of_samples, sum_of_samples
from algorithms.functional.ratios import MAX_LOG_RATIO, masked_log_ratio

if TYPE_CHECKING:
    from torch import Tensor

CORRECTIONS = ("tis", "mis", "icepop")
CORRECTION_LEVELS = ("token", "sequence")


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

    ``level`` "token": ρ_t = π_old / μ of the token; "sequence": the product over its sample's trained tokens.
    ``method`` "tis" clamps ρ to [low, high] (truncated importance sampling); "mis" and "icepop" keep ρ inside and give
    0 outside (masked importance sampling; IcePop is its token-level form). A masked token has weight 1.
    """
    log_ratio = masked_log_ratio(old_logprobs, rollout_logprobs, loss_mask).detach()
    if level == "sequence":
        sums = sum_of_samples(
            per_token=log_ratio, loss_mask=loss_mask, sample_ids=sample_ids, num_samples=num_samples
        ).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_ratio = sums[sample_ids].masked_fill(~loss_mask, 0.0)
    elif level != "token":
        raise ValueError(f"correction level {level!r} is not one of {', '.join(CORRECTION_LEVELS)}")
    ratio = log_ratio.exp()
    outside = ((ratio < low) | (ratio > high)) & loss_mask
    if method == "tis":
        return ratio.clamp(low, high), outside
    if method in ("mis", "icepop"):
        return ratio.masked_fill(outside, 0.0), outside
    raise ValueError(f"correction {method!r} is not one of {', '.join(CORRECTIONS)}")


def kept_by_opsm(
    *, log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, sample_ids: Tensor, num_samples: int, threshold: float
) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2): ``[tokens]`` bool, False where the token is left out.

    Left out are tokens with a negative advantage of samples whose mean log π_old - log π is above ``threshold``.
    ``log_ratio`` ``[tokens]`` is log π - log π_old.
    """
    drift = -mean_of_samples(
        per_token=log_ratio.detach(), loss_mask=loss_mask, sample_ids=sample_ids, num_samples=num_samples
    )
    return ~((drift > threshold)[sample_ids] & (advantages < 0))
