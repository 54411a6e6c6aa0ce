"""Trust regions: masks of tokens with a probability too far from their probability under the old policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TRUST_REGIONS = ("ratio", "probability", "probability_both")
CISPO_TRUST_REGIONS = ("none", "ratio")


def probability_difference(logprobs: Tensor, other_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns π - π_other of each token, in [-1, 1], ``[tokens]``, detached, and 0 where masked."""
    return (logprobs.detach().exp() - other_logprobs.exp()).masked_fill(~loss_mask, 0.0)


def outside_trust_region(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    low: float,
    high: float,
    trust_region: str,
) -> tuple[Tensor, Tensor]:
    """Returns two ``[tokens]`` bool tensors: where D = π - π_old is too low, and where D is too high.

    For ``trust_region`` "probability" (DPPO with binary total variation, arXiv 2602.04879), D is too low if D <
    -``low`` and A < 0, and too high if D > ``high`` and A > 0: the update would move the token's probability even
    further away. For "probability_both" (IPO of prime-rl), the conditions are D < -``low`` and D > ``high`` for any A.
    Raises ValueError for another ``trust_region``.
    """
    moved = probability_difference(logprobs, old_logprobs, loss_mask)
    down, up = moved < -low, moved > high
    if trust_region == "probability_both":
        return down, up
    if trust_region == "probability":
        return down & (advantages < 0), up & (advantages > 0)
    raise ValueError(f"trust region {trust_region!r} is not one of {', '.join(TRUST_REGIONS)}")
