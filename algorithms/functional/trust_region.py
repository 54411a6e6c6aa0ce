"""Where a token's probability has moved too far from the old policy's for the token to be trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TRUST_REGIONS = ("ratio", "probability", "probability_both")
CISPO_TRUST_REGIONS = ("none", "ratio")


def probability_difference(logprobs: Tensor, other_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """``[tokens]``: how much likelier the one finds the token than the other, in -1..1, detached; 0 where masked."""
    return (logprobs.detach().exp() - other_logprobs.exp()).masked_fill(~loss_mask, 0.0)


def moved_too_far(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    low: float,
    high: float,
    trust_region: str,
) -> tuple[Tensor, Tensor]:
    """``[tokens]`` bool each: where D = π - π_old of the token is too low, and where it is too high.

    "probability" (DPPO with binary total variation, arXiv 2602.04879): D < -``low`` where A < 0, and D > ``high`` where
    A > 0, that is where the step would go on in the direction in which the token has moved. "probability_both" (IPO of
    prime-rl): D < -``low`` and D > ``high``, whatever A is.
    """
    moved = probability_difference(logprobs, old_logprobs, loss_mask)
    down, up = moved < -low, moved > high
    if trust_region == "probability_both":
        return down, up
    if trust_region == "probability":
        return down & (advantages < 0), up & (advantages > 0)
    raise ValueError(f"trust region {trust_region!r} is not one of {', '.join(TRUST_REGIONS)}")
