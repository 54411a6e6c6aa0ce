"""Computes losses of preference pairs, one value per pair, from the log-ratios of policy and reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PREFERENCE_LOSSES = ("sigmoid", "ipo", "hinge", "robust")


def preference_loss(*, margins: Tensor, beta: float, kind: str, label_smoothing: float = 0.0) -> Tensor:
    """Returns the loss of each pair, ``[pairs]``, from ``margins`` ``[pairs]``.

    A margin is h = log π/π_ref of the chosen response minus log π/π_ref of the rejected response; β is ``beta`` and ε
    is ``label_smoothing``, the assumed share of pairs with swapped labels.

    - "sigmoid": -(1 - ε) log σ(β h) - ε log σ(-β h) (DPO, arXiv 2305.18290, eq. 7; with ε it is cDPO).
    - "robust": (-(1 - ε) log σ(β h) + ε log σ(-β h)) / (1 - 2 ε) (arXiv 2403.00409, eq. 3.2), unbiased for noise ε.
    - "hinge": max(0, 1 - β h) (SLiC, arXiv 2305.10425, with DPO's margin).
    - "ipo": (h - 1 / (2 β))² (arXiv 2310.12036, eq. 17).

    Raises ValueError for an unknown ``kind``.
    """
    from torch.nn.functional import logsigmoid

    scaled = beta * margins
    if kind == "sigmoid":
        return -(1.0 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)
    if kind == "robust":
        wrong = label_smoothing * logsigmoid(-scaled)
        return (-(1.0 - label_smoothing) * logsigmoid(scaled) + wrong) / (1.0 - 2.0 * label_smoothing)
    if kind == "hinge":
        return (1.0 - scaled).clamp(min=0.0)
    if kind == "ipo":
        return (margins - 1.0 / (2.0 * beta)).square()
    raise ValueError(f"preference loss {kind!r} is not one of {', '.join(PREFERENCE_LOSSES)}")
