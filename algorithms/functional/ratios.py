"""Log-ratios of two policies, and the KL estimators made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")
MAX_LOG_RATIO = 20.0


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
