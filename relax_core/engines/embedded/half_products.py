"""Multiplies float32 activations by 16-bit weights, for processors with slow bfloat16 products.

Without AVX-512, torch multiplies bfloat16 numbers five times slower than float32 numbers. On such processors, the
engine computes a bfloat16 model in float32. The matrices are packed as float16 for FBGEMM, with half of float32's
memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_FLOAT16_MAX = 65504.0


def computing_dtype(stored: torch.dtype) -> torch.dtype:
    """Returns the dtype for computing a model with weights of dtype ``stored``."""
    slow = stored == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.float32 if slow and "fbgemm" in torch.backends.quantized.supported_engines else stored


class HalfMatrix:
    """Holds a bfloat16 matrix and a packed float16 copy. Call `pack` after each change of the matrix.

    The copy has the same numbers, except that numbers below 2**-17 are rounded to a multiple of 2**-24. A matrix with
    non-finite numbers or numbers beyond float16 is multiplied in float32 without the copy, which preserves these
    numbers.
    """

    __slots__ = ("_packed", "_stored")

    def __init__(self, stored: Tensor) -> None:
        """Keeps a reference to the matrix ``[out, in]``; the caller may change its numbers."""
        self._stored = stored
        self._packed: Any = None

    def pack(self) -> None:
        """Packs the current numbers of the matrix."""
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
    """Packs all matrices, with torch's number of threads. A thread needs about 10 ns per number."""
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="pack") as threads:
        list(threads.map(HalfMatrix.pack, matrices))
