"""LoRA: settings, factors, and the sum of a weight and its factors, for trainer and readers of weights.

The same order of operations on both sides gives the same bits in bfloat16, so that engine and trainer agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHT = ".weight"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Holds the settings of adapters (the keys `model.lora`)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool

    @property
    def scale(self) -> float:
        """Returns the factor s of B·A."""
        return lora_scale(rank=self.rank, alpha=self.alpha, rslora=self.rslora)


class LoraFactors(NamedTuple):
    """Holds the factors of one Hugging Face tensor ``name`` ``[out, in]``: ``a`` ``[rank, in]``, ``b`` ``[out, rank]``.

    The adapted weight is the tensor plus ``scale`` * b @ a.
    """

    name: str
    a: Tensor
    b: Tensor
    scale: float


def factor_names(name: str) -> tuple[str, str]:
    """Returns the names of the factors A and B of a weight, as in PEFT: q_proj.lora_A.weight for q_proj.weight."""
    module = name.removesuffix(_WEIGHT)
    return f"{module}.lora_A{_WEIGHT}", f"{module}.lora_B{_WEIGHT}"


def lora_scale(*, rank: int, alpha: float, rslora: bool) -> float:
    """Returns alpha / rank, or alpha / √rank for rank-stabilized LoRA (arXiv 2312.03732)."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns weight + scale * b @ a in the dtype of ``weight``; the sum is in float32 and is cast once.

    ``weight`` has the shape ``[out, in]``, ``a`` ``[rank, in]``, ``b`` ``[out, rank]``.
    """
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)
