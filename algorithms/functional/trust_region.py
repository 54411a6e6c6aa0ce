"""Trust regions: masks of tokens whose probability moved too far from the old policy's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TRUST_REGIONS = ("ratio", "probability", "probability_both")
CISPO_TRUST_REGIONS = ("none", "ratio")


def probability_difference(logprobs: Tensor, other_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns π - π_other of each token, in [-1, 1], ``[tokens]``, detached; 0 where masked."""
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
    """Returns the tokens whose D = π - π_old is too low, and those where it is too high; two ``[tokens]`` bool tensors.

    ``trust_region`` "probability" (DPPO with binary total variation, arXiv 2602.04879) means D < -``low`` with A < 0,
    and D > ``high`` with A > 0: the step would move the token further in the direction in which it has already moved.
    "probability_both" (IPO of prime-rl) means D < -``low`` and D > ``high`` for any A. Raises ValueError for another
    ``trust_region``.
    """
    moved = probability_difference(logprobs, old_logprobs, loss_mask)
    down, up = moved < -low, moved > high
    if trust_region == "probability_both":
        return down, up
    if trust_region == "probability":
        return down & (advantages < 0), up & (advantages > 0)
    raise ValueError(f"trust region {trust_region!r} is not one of {', '.join(TRUST_REGIONS)}")
