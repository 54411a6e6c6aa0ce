"""Adds the product of LoRA factors to a weight; the trainer's forward pass and all readers use this function.

The same order of operations on both sides gives the same bits in bfloat16, so that engine and trainer agree.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

FACTOR_A, FACTOR_B = ".lora_A.weight", ".lora_B.weight"  # suffixes of the factors' names, as in PEFT


class LoraFactors(NamedTuple):
    """Holds the factors of one Hugging Face tensor ``name`` ``[out, in]``: ``a`` ``[rank, in]``, ``b`` ``[out, rank]``.

    The adapted weight is the tensor plus ``scale`` * b @ a.
    """

    name: str
    a: Tensor
    b: Tensor
    scale: float


def lora_scale(*, rank: int, alpha: float, rslora: bool) -> float:
    """Returns alpha / rank, or alpha / √rank for rank-stabilized LoRA (arXiv 2312.03732)."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns weight + scale * b @ a in the dtype of ``weight``; the sum is in float32 and is cast once.

    ``weight`` has the shape ``[out, in]``, ``a`` ``[rank, in]``, ``b`` ``[out, rank]``.
    """
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)
