"""Implements two kernels of sgl_kernel's CPU build in torch: the kernels that a dense or MoE Qwen3 needs.

The original package has no wheel for CPUs without AMX. All other kernels raise NotImplementedError with the kernel's
name, to avoid silent errors. All code is in ``__init__.py``, because SGLang imports the package by this name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__version__ = "0.4.10"  # the version of sgl_kernel that this SGLang requires
_UINT32 = 0xFFFFFFFF
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
# SGLang's processor of Qwen3-VL imports the model of Qwen3.5, which looks up these operators. A call raises
# NotImplementedError with the operator's name.
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _library.define(f"{_name}(Tensor first, Tensor second) -> Tensor")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Writes each request's cache indices to ``req_to_token[request]``.

    ``out_cache_loc`` has the indices of all requests, one request after the other.
    """
    taken = 0
    for request, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        length = end - start
        req_to_token[request, start:end] = out_cache_loc[taken : taken + length].to(req_to_token.dtype)
        taken += length


def _rotated(value: Tensor, bits: int) -> Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _UINT32


def _mixed(hashed: Tensor, block: Tensor) -> Tensor:
    block = _rotated((block * 0xCC9E2D51) & _UINT32, 15)
    hashed = hashed ^ ((block * 0x1B873593) & _UINT32)
    return (_rotated(hashed, 13) * 5 + 0xE6546B64) & _UINT32


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """Returns MurmurHash3 x86 32 (Appleby) of 16 bytes: seed (two words), position, vocabulary entry.

    ``seed`` and ``positions`` are [samples]. ``col_indices`` is [vocabulary entries]. The result is uint32 [samples,
    vocabulary entries]. SGLang samples tokens with these numbers.
    """
    seed, positions, columns = (tensor.to(torch.int64) for tensor in (seed, positions, col_indices))
    hashed = _mixed(torch.zeros_like(seed), seed & _UINT32)
    hashed = _mixed(hashed, (seed >> 32) & _UINT32)
    hashed = _mixed(hashed, positions & _UINT32)
    hashed = _mixed(hashed[:, None], columns[None, :] & _UINT32) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & _UINT32
    return hashed.to(torch.uint32)


_library.impl("murmur_hash32_cpu", murmur_hash32, "CompositeExplicitAutograd")


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: object, **keywords: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not implemented on a CPU (relax_core/engines/sglang/cpu)")

    return missing
