"""Multiplies float32 activations by 16-bit weights, for processors with slow bfloat16 products.

Without AVX-512, torch multiplies bfloat16 numbers five times slower than float32 numbers. There the engine computes a
bfloat16 model in float32, with its matrices packed as float16 for FBGEMM, which needs half of float32's memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_FLOAT16_MAX = 65504.0


def computing_dtype(stored: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a model with weights of dtype ``stored`` is computed."""
    slow = stored == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.float32 if slow and "fbgemm" in torch.backends.quantized.supported_engines else stored


class HalfMatrix:
    """Holds a bfloat16 matrix and a packed copy of it in float16, which `pack` makes after each change.

    The copy has the same numbers, but those below 2**-17 are rounded to a multiple of 2**-24. A matrix with numbers
    that are not finite or exceed float16 is multiplied in float32 without the copy, so that these numbers stay visible.
    """

    __slots__ = ("_packed", "_stored")

    def __init__(self, stored: Tensor) -> None:
        """Takes the matrix ``[out, in]``; the caller may change its numbers."""
        self._stored = stored
        self._packed: Any = None

    def pack(self) -> None:
        """Packs the numbers that the matrix has now."""
        numbers = self._stored.float()
        low, high = numbers.aminmax()
        fits = bool(low >= -_FLOAT16_MAX) and bool(high <= _FLOAT16_MAX)
        self._packed = torch.ops.quantized.linear_prepack_fp16(numbers, None) if fits else None

    def product(self, tokens: Tensor) -> Tensor:
        """Returns float32 ``tokens`` ``[tokens, in]`` times the transposed matrix: ``[tokens, out]``."""
        if self._packed is None:
            return torch.mm(tokens, self._stored.float().t())
        found: Tensor = torch.ops.quantized.linear_dynamic_fp16(tokens, self._packed)
        return found


def pack_all(matrices: Sequence[HalfMatrix]) -> None:
    """Packs all matrices, in as many threads as torch uses; a thread takes about 10 ns for each number."""
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="pack") as threads:
        list(threads.map(HalfMatrix.pack, matrices))
