"""Computes policy losses from the ratio r = π / π_old, one value per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from algorithms.functional.aggregation import sample_means
from algorithms.functional.ratios import masked_log_ratio
from algorithms.functional.trust_region import CISPO_TRUST_REGIONS, outside_trust_region

if TYPE_CHECKING:
    from torch import Tensor


class PolicyLoss(NamedTuple):
    """Holds the loss of each token and the inputs of the metrics. Every field is ``[tokens]``.

    ``per_token`` is the loss. ``ratio`` is the ratio that the loss uses. ``log_ratio`` is its log, 0 at masked tokens.
    ``cut_low`` and ``cut_high`` (bool) are True where the loss has no gradient because the ratio is too low or too
    high.
    """

    per_token: Tensor
    log_ratio: Tensor
    ratio: Tensor
    cut_low: Tensor
    cut_high: Tensor


def clipped_policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    trust_region: str = "ratio",
) -> PolicyLoss:
    """Returns PPO's clipped surrogate -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347, eq. 7).

    All inputs are ``[tokens]``. ``dual_clip`` above 0 (arXiv 1912.09729; 3.0 is usual) limits the loss to ``dual_clip``
    × |A| if A < 0. A ``trust_region`` other than "ratio" replaces the clip by a mask: the loss is 0 where
    `outside_trust_region` is True, and -r A elsewhere.
    """
    log_ratio = masked_log_ratio(logprobs, old_logprobs, loss_mask)
    if trust_region == "ratio":
        return _clipped_surrogate(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    moved_down, moved_up = outside_trust_region(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
        low=clip_low,
        high=clip_high,
        trust_region=trust_region,
    )
    ratio = log_ratio.exp()
    per_token = -ratio * advantages
    dual_cut = moved_up & False
    if dual_clip > 0:
        bad = advantages < 0
        per_token = per_token.minimum(-dual_clip * advantages).where(bad, per_token)
        dual_cut = (ratio.detach() > dual_clip) & bad
    per_token = per_token.masked_fill(moved_down | moved_up, 0.0)
    return PolicyLoss(per_token, log_ratio, ratio, moved_down, moved_up | dual_cut)


def gspo_policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sample_ids: Tensor,
    num_samples: int,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> PolicyLoss:
    """Returns GSPO's loss (arXiv 2507.18071): the clipped surrogate of one ratio per sample, s = exp(mean of log r).

    The loss uses the token form sg(s) π / sg(π), where sg stops the gradient. If all tokens of a sample have the same
    advantage, value and gradient are the same as in the sequence form. For a sample of one token the loss equals
    `clipped_policy_loss`. All inputs are ``[tokens]``. ``dual_clip`` has the same meaning as in `clipped_policy_loss`.
    """
    of_tokens = masked_log_ratio(logprobs, old_logprobs, loss_mask)
    of_samples = sample_means(
        per_token=of_tokens.detach(), loss_mask=loss_mask, sample_ids=sample_ids, num_samples=num_samples
    )
    log_ratio = of_samples[sample_ids].masked_fill(~loss_mask, 0.0) + (of_tokens - of_tokens.detach())
    return _clipped_surrogate(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def _clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> PolicyLoss:
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token = -(ratio * advantages).minimum(clipped * advantages)
    value = ratio.detach()
    bad, good = advantages < 0, advantages > 0
    cut_low, cut_high = (value < 1.0 - clip_low) & bad, (value > 1.0 + clip_high) & good
    if dual_clip > 0:
        per_token = per_token.minimum(-dual_clip * advantages).where(bad, per_token)
        cut_high = cut_high | ((value > dual_clip) & bad)
    return PolicyLoss(per_token, log_ratio, ratio, cut_low, cut_high)


def sapo_policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    tau_positive: float,
    tau_negative: float,
) -> PolicyLoss:
    """Returns SAPO's loss -f(r) A with the soft gate f(x) = 4/τ σ(τ (x - 1)) (arXiv 2511.20347).

    τ is ``tau_positive`` if A > 0, else ``tau_negative``. The weight of the gradient is 4 p (1 - p) with p = σ(τ (r -
    1)). It is 1 at r = 1 and decreases on both sides. ``cut_low`` and ``cut_high`` are True where this weight is below
    one half.
    """
    log_ratio = masked_log_ratio(logprobs, old_logprobs, loss_mask)
    ratio = log_ratio.exp()
    tau = advantages.new_full(advantages.shape, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = (tau * (ratio - 1.0)).sigmoid()
    per_token = -4.0 / tau * gate * advantages
    value, weight = ratio.detach(), (4.0 * gate * (1.0 - gate)).detach()
    weak = weight < 0.5
    return PolicyLoss(per_token, log_ratio, ratio, weak & (value < 1.0), weak & (value > 1.0))


def cispo_policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_low: float,
    clip_high: float,
    trust_region: str = "none",
) -> PolicyLoss:
    """Returns CISPO's loss -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π (arXiv 2506.13585, eq. 4 and 5).

    sg stops the gradient. Only the weight is clipped, so every token keeps a gradient. ``cut_low`` and ``cut_high`` are
    True where the weight was clipped. ``trust_region`` "ratio" is the paper's unified form (eq. 6 and 7) with the same
    bounds. It also sets the loss to 0 where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low. These are the
    tokens without a gradient in PPO. Raises ValueError for an unknown ``trust_region``.
    """
    if trust_region not in CISPO_TRUST_REGIONS:
        raise ValueError(f"trust region {trust_region!r} is not one of {', '.join(CISPO_TRUST_REGIONS)}")
    log_ratio = masked_log_ratio(logprobs, old_logprobs, loss_mask)
    ratio = log_ratio.exp()
    value = ratio.detach()
    weight = value.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token = -weight * advantages * logprobs.masked_fill(~loss_mask, 0.0)
    cut_low, cut_high = value < 1.0 - clip_low, value > 1.0 + clip_high
    if trust_region == "ratio":
        per_token = per_token.masked_fill((cut_low & (advantages < 0)) | (cut_high & (advantages > 0)), 0.0)
    return PolicyLoss(per_token, log_ratio, ratio, cut_low, cut_high)
