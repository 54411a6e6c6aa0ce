"""Implements kernels of sgl_kernel's CPU build in torch: the kernels that Qwen3 and Qwen3.5 need, dense and MoE.

The original package has no wheel for CPUs without AMX. All other kernels raise NotImplementedError with the kernel's
name, to avoid silent errors. SGLang imports this package, and its module ``mamba.py``, by these names. It calls
operators of ``torch.ops.sgl_kernel`` too; their names and arguments are those of SGLang's calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.engines.sglang.cpu.delta_net_kernels import (
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
)
from relax_core.families.delta_rule import gated_norm

__version__ = "0.4.10"  # the version of sgl_kernel that this SGLang requires
_UINT32 = 0xFFFFFFFF
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.define("fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()")
_library.define("fused_rmsnorm_gated_cpu(Tensor x, Tensor weight, Tensor z, float eps) -> Tensor")
_library.define(
    "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim)"
    " -> (Tensor, Tensor)"
)
_library.define(
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps,"
    " int head_dim, int num_head) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk,"
    " int num_heads_v, int head_qk, int head_v) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)")
_library.define(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a,"
    " Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens,"
    " bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) -> Tensor"
)


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


def fused_sigmoid_mul(x: Tensor, gate: Tensor) -> None:
    """Multiplies ``x`` in place by the sigmoid of ``gate``."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qk_gemma_rmsnorm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Returns the normed heads of queries and keys, ``[tokens * heads, head_dim]``. A norm multiplies by 1 + weight."""
    return _head_norm(q, q_weight, eps, head_dim), _head_norm(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns also the gates. Each head of ``q_gate`` has a query and a gate; see `fused_qk_gemma_rmsnorm`."""
    q, gate = q_gate.reshape(-1, num_head, 2 * head_dim).chunk(2, dim=-1)
    return (
        _head_norm(q, q_weight, eps, head_dim),
        _head_norm(k, k_weight, eps, head_dim),
        gate.reshape(-1, head_dim).contiguous(),
    )


def _head_norm(rows: Tensor, weight: Tensor, eps: float, head_dim: int) -> Tensor:
    heads = rows.reshape(-1, head_dim)
    return F.rms_norm(heads.float(), (head_dim,), 1.0 + weight.float(), eps).to(rows.dtype)


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits the projections of a delta net: inputs of the convolution, output gates z, and the inputs b and a."""
    gates = num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + gates, gates], dim=-1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], dim=-1)
    return mixed_qkv.contiguous(), z.reshape(-1, num_heads_v, head_v).contiguous(), b.contiguous(), a.contiguous()


def fused_rmsnorm_gated(x: Tensor, weight: Tensor, z: Tensor, eps: float) -> Tensor:
    return gated_norm(x, z, weight, eps=eps)


for _name, _kernel in (
    ("murmur_hash32_cpu", murmur_hash32),
    ("fused_sigmoid_mul_cpu", fused_sigmoid_mul),
    ("fused_rmsnorm_gated_cpu", fused_rmsnorm_gated),
    ("fused_qk_gemma_rmsnorm_cpu", fused_qk_gemma_rmsnorm),
    ("fused_qk_gemma_rmsnorm_with_gate_cpu", fused_qk_gemma_rmsnorm_with_gate),
    ("fused_qkvzba_split_reshape_cat_contiguous_cpu", fused_qkvzba_split_reshape_cat_contiguous),
    ("fused_gdn_gating_cpu", fused_gdn_gating_cpu),
    ("fused_sigmoid_gating_delta_rule_update_cpu", fused_sigmoid_gating_delta_rule_update_cpu),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: object, **keywords: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not implemented on a CPU (relax_core/engines/sglang/cpu)")

    return missing
