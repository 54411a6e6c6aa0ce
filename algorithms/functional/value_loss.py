"""The critic's loss, one value a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class ValueLoss(NamedTuple):
    """Per token ``[tokens]``: the loss, 0 where masked; bool: where the clip holds the gradient back."""

    per_token: Tensor
    cut: Tensor


def clipped_value_loss(
    *, values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, clip: float
) -> ValueLoss:
    """½ · max((V - R)², (clip(V, V_old ± clip) - R)²), the value loss of PPO's reference implementation; all inputs
    ``[tokens]``. ``clip`` 0: ½ · (V - R)² alone."""
    error = (values - returns).masked_fill(~loss_mask, 0.0)
    if clip == 0:
        return ValueLoss(0.5 * error.square(), loss_mask.new_zeros(loss_mask.shape))
    moved = (values - old_values).masked_fill(~loss_mask, 0.0)
    start = (old_values - returns).masked_fill(~loss_mask, 0.0)
    clipped = start + moved.clamp(-clip, clip)
    cut = (moved.detach().abs() > clip) & (clipped.detach().abs() > error.detach().abs())
    return ValueLoss(0.5 * error.square().maximum(clipped.square()), cut)
