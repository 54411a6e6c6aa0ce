"""Computes log-ratios of two policies, KL estimators from log-ratios, and the KL term of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3", "k3_clamped", "abs")
KL_LOSSES = ("loss", "loss_times_ratio", "loss_k2_gradient")
MAX_LOG_RATIO = 20.0
MAX_KL = 10.0  # upper bound of k3_clamped


def masked_log_ratio(numerator: Tensor, denominator: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns ``numerator - denominator`` of two ``[tokens]`` log-probs, clamped to [-20, 20].

    Masked tokens have the value 0 and no gradient.
    """
    return (numerator - denominator).masked_fill(~loss_mask, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(*, logprobs: Tensor, reference_logprobs: Tensor, loss_mask: Tensor, estimator: str) -> Tensor:
    """Returns an estimate of KL(π ‖ π_ref) for each token, ``[tokens]`` (Schulman 2020, "Approximating KL divergence").

    With x = log π - log π_ref, ``estimator`` is one of k1 = x, k2 = x²/2, k3 = e^-x + x - 1 (never negative),
    k3_clamped = min(k3, 10) and abs = |x|. As a loss, k1 has an expected gradient of 0 on policy. Masked tokens have
    the value 0. Raises ValueError for an unknown ``estimator``.
    """
    x = masked_log_ratio(logprobs, reference_logprobs, loss_mask)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return 0.5 * x.square()
    if estimator == "k3":
        return (-x).expm1() + x
    if estimator == "k3_clamped":
        return ((-x).expm1() + x).clamp(max=MAX_KL)
    if estimator == "abs":
        return x.abs()
    raise ValueError(f"KL estimator {estimator!r} is not one of {', '.join(KL_ESTIMATORS)}")


def kl_loss(
    *,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    estimator: str,
    placement: str,
) -> Tensor:
    """Returns the KL to the reference as a loss term, ``[tokens]``. Masked tokens have value 0 and no gradient.

    ``placement`` says how the estimate enters the loss:

    - "loss": `kl_estimate` itself.
    - "loss_times_ratio": `kl_estimate` times the ratio π / π_old (DeepSeek-V3.2, arXiv 2512.02556, eq. 7). The gradient
      also flows through the ratio. With k1 or k3, the mean over samples of π_old is the KL of the current policy, and
      the mean gradient is the gradient of this KL. k3_clamped clamps the product.
    - "loss_k2_gradient": the value of ``estimator`` with the gradient of k2 (a straight-through estimator). On policy,
      the expected gradient of k2 is the gradient of the KL.

    Raises ValueError for an unknown ``placement``.
    """

    def estimate(kind: str) -> Tensor:
        return kl_estimate(
            logprobs=logprobs, reference_logprobs=reference_logprobs, loss_mask=loss_mask, estimator=kind
        )

    if placement == "loss":
        return estimate(estimator)
    if placement == "loss_times_ratio":
        ratio = masked_log_ratio(logprobs, old_logprobs, loss_mask).exp()
        if estimator == "k3_clamped":
            return (ratio * estimate("k3")).clamp(max=MAX_KL)
        return ratio * estimate(estimator)
    if placement == "loss_k2_gradient":
        k2 = estimate("k2")
        return estimate(estimator).detach() + (k2 - k2.detach())
    raise ValueError(f"KL loss {placement!r} is not one of {', '.join(KL_LOSSES)}")
