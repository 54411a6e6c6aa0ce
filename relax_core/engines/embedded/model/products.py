"""Multiplies tokens with a weight matrix, by the faster of two libraries.

A call of oneDNN costs 10 µs, and up to 40 µs among other operators; a call of MKL costs 1 µs. The products themselves
are equally fast if both libraries use AVX-512. On an AMD core MKL uses AVX2, and oneDNN is up to twice as fast.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ONEDNN_FROM = 1 << 21  # multiply-adds, for which MKL takes about 40 µs
# Token counts are padded to a multiple of _STEP: oneDNN takes 0.4 ms to prepare a shape, and keeps 1,024 shapes.
_STEP = 64


def product(tokens: Tensor, weight_t: Tensor) -> Tensor:
    """Returns ``tokens`` ``[tokens, in]`` times ``weight_t`` ``[in, out]``, a transposed view: ``[tokens, out]``."""
    if _for_onednn(tokens, weight_t):
        return _onednn(tokens, weight_t)
    return torch.mm(tokens, weight_t)


def add_product(x: Tensor, tokens: Tensor, weight_t: Tensor) -> Tensor:
    """Returns the product plus ``x``, which is ``[tokens, out]``, or ``[out]`` and then added to every token."""
    if _for_onednn(tokens, weight_t):
        return _onednn(tokens, weight_t).add_(x)
    return torch.addmm(x, tokens, weight_t)


def _for_onednn(tokens: Tensor, weight_t: Tensor) -> bool:
    """Is True for large float32 products of enough tokens; in bfloat16 torch uses oneDNN by itself.

    Fewer tokens than `_STEP` would mostly multiply the padding.
    """
    count = tokens.shape[0]
    return count >= _STEP and count * weight_t.numel() >= ONEDNN_FROM and tokens.dtype == torch.float32


def _onednn(tokens: Tensor, weight_t: Tensor) -> Tensor:
    count = tokens.shape[0]
    if over := count % _STEP:
        tokens = F.pad(tokens, (0, 0, 0, _STEP - over))
    found: Tensor = torch.ops.mkldnn._linear_pointwise(tokens, weight_t.t(), None, "none", [], "")
    return found[:count]
