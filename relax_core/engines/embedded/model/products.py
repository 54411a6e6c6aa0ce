"""Products of rows with a weight matrix, by the faster of two libraries.

A call of oneDNN costs 10 µs, and among other operators up to 40; one of MKL costs 1. Where both take AVX-512 they are
alike beyond that; on an AMD core, where MKL takes AVX2, oneDNN is up to twice as fast.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ONEDNN_FROM = 1 << 21  # multiply-adds: 40 µs of MKL
_STEP = 64  # rows come in multiples of it: oneDNN takes 0.4 ms to get ready for a shape, and remembers 1,024 shapes


def product(rows: Tensor, weight_t: Tensor) -> Tensor:
    """``[rows, in]`` times ``weight_t`` ``[in, out]``, a transposed view, → ``[rows, out]``."""
    if _for_onednn(rows, weight_t):
        return _onednn(rows, weight_t)
    return torch.mm(rows, weight_t)


def add_product(x: Tensor, rows: Tensor, weight_t: Tensor) -> Tensor:
    """Returns the product plus ``x``, which is ``[rows, out]``, or ``[out]`` and then added to every row."""
    if _for_onednn(rows, weight_t):
        return _onednn(rows, weight_t).add_(x)
    return torch.addmm(x, rows, weight_t)


def _for_onednn(rows: Tensor, weight_t: Tensor) -> bool:
    """In bfloat16 torch takes oneDNN by itself."""
    return rows.shape[0] * weight_t.numel() >= ONEDNN_FROM and rows.dtype == torch.float32


def _onednn(rows: Tensor, weight_t: Tensor) -> Tensor:
    count = rows.shape[0]
    if over := count % _STEP:
        rows = F.pad(rows, (0, 0, 0, _STEP - over))
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight_t.t(), None, "none", [], "")
    return found[:count]
