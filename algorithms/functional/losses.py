"""Policy losses of r = π / π_old, one value a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from algorithms.functional.aggregation import mean_of_samples
from algorithms.functional.ratios import masked_log_ratio
from algorithms.functional.trust_region import CISPO_TRUST_REGIONS, moved_too_far

if TYPE_CHECKING:
    from torch import Tensor


class PolicyLoss(NamedTuple):
    """Per token ``[tokens]``: the loss; the log of the ratio that it is made of (0 at masked tokens) and that ratio;
    bool: where the loss held the gradient back because the ratio was too low, and where because it was too high."""

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
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with a lower and an upper range; all inputs ``[tokens]``.

    ``dual_clip`` above 0 (arXiv 1912.09729; 3.0 is usual): where A < 0 the loss is at most ``dual_clip`` × |A|.
    ``trust_region`` other than "ratio" puts a mask in the place of the clip: the loss is -r · A, and 0 where
    `moved_too_far` says so.
    """
    log_ratio = masked_log_ratio(logprobs, old_logprobs, loss_mask)
    if trust_region == "ratio":
        return _clipped_surrogate(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    moved_down, moved_up = moved_too_far(
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
    """GSPO (arXiv 2507.18071): the clipped surrogate of s = exp(mean of log r over the sample), one for all its tokens.

    In the token form sg(s) · π / sg(π), which has the value and the gradient of the sequence form wherever a sample's
    tokens share one advantage. A sample of one token gives `clipped_policy_loss`.
    """
    of_tokens = masked_log_ratio(logprobs, old_logprobs, loss_mask)
    of_samples = mean_of_samples(
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
    """SAPO (arXiv 2511.20347): -f(r) · A with f(x) = 4/τ · σ(τ (x - 1)), a soft gate in the place of the clip.

    τ is ``tau_positive`` where A > 0, else ``tau_negative``. The gradient's weight 4p(1 - p), p = σ(τ (r - 1)), is 1 at
    r = 1 and falls on both sides; ``cut_low`` and ``cut_high`` are where it is below one half.
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
    """CISPO (arXiv 2506.13585, eq. 4 and 5): -sg(clip(r, 1 - clip_low, 1 + clip_high)) · A · log π.

    The weight is clipped, never the gradient: every token keeps one. ``cut_low``, ``cut_high``: where it was clipped.
    ``trust_region`` "ratio" is the paper's unified form (eq. 6 and 7), with the same bounds for its mask: 0 where A > 0
    and r > 1 + clip_high, or A < 0 and r < 1 - clip_low, which are PPO's tokens without a gradient.
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
