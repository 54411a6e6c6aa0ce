"""Computes the loss of the critic, one value per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class ValueLoss(NamedTuple):
    """Holds the critic's loss and its clip mask, each ``[tokens]``.

    ``per_token`` is the loss, 0 where masked. ``cut`` (bool) is True where the clip removes the gradient.
    """

    per_token: Tensor
    cut: Tensor


def clipped_value_loss(
    *, values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, clip: float
) -> ValueLoss:
    """Returns ½ max((V - R)², (clip(V, V_old - clip, V_old + clip) - R)²), like PPO's reference implementation.

    All inputs are ``[tokens]`` float. With ``clip`` 0 the loss is ½ (V - R)².
    """
    error = (values - returns).masked_fill(~loss_mask, 0.0)
    if clip == 0:
        return ValueLoss(0.5 * error.square(), loss_mask.new_zeros(loss_mask.shape))
    moved = (values - old_values).masked_fill(~loss_mask, 0.0)
    start = (old_values - returns).masked_fill(~loss_mask, 0.0)
    clipped = start + moved.clamp(-clip, clip)
    cut = (moved.detach().abs() > clip) & (clipped.detach().abs() > error.detach().abs())
    return ValueLoss(0.5 * error.square().maximum(clipped.square()), cut)
