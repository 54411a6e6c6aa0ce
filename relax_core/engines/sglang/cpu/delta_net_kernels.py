"""Implements the kernels of sgl_kernel's CPU build for a gated delta net in torch: those that Qwen3.5 needs.

The states of all requests are in two pools, which the kernels change in place: the last inputs of the convolution,
``[slots, channels, width - 1]``, and the recurrent states, float32 ``[slots, value heads, value dim, key dim]``. The
gated delta rule is that of the trainer and the embedded engine (`relax_core.families.delta_rule`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.families.delta_rule import Segments, gated_delta_rule, log_decay


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **others: Any,
) -> Tensor:
    """Convolves the prefill of requests, ``x`` ``[channels, tokens]``, each after the inputs in its slot."""
    outputs = []
    for request, slot in enumerate(cache_indices.tolist()):
        inputs = x[:, int(query_start_loc[request]) : int(query_start_loc[request + 1])]
        before = conv_states[slot] if bool(has_initial_state[request]) else torch.zeros_like(conv_states[slot])
        inputs = torch.cat([before.to(x.dtype), inputs], dim=1)
        conv_states[slot] = inputs[:, inputs.shape[1] - before.shape[1] :].to(conv_states.dtype)
        outputs.append(_convolved(inputs[None], weight, bias, activation)[0])
    return torch.cat(outputs, dim=1)


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """Convolves one new token per request, ``x`` ``[requests, channels]``, after the inputs in its slot."""
    slots = conv_state_indices.long()
    inputs = torch.cat([conv_states[slots].to(x.dtype), x[..., None]], dim=2)
    conv_states[slots] = inputs[:, :, 1:].to(conv_states.dtype)
    return _convolved(inputs, weight, bias, activation)[..., 0]


def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Convolves each channel of ``inputs``, ``[requests, channels, width - 1 + tokens]``."""
    convolved = F.conv1d(inputs, weight[:, None], bias, groups=len(weight))
    if activation is None:
        return convolved
    assert activation in ("silu", "swish"), activation
    return F.silu(convolved)


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    initial_state_indices: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None, None]:
    """Applies the rule to the prefill of requests; the first axis of all rows is 1.

    The kernel of GPUs also returns the states after each chunk, which SGLang needs only for a cache of prefixes that a
    CPU does not have (mamba_radix_cache_strategy=extra_buffer).
    """
    assert use_qk_l2norm_in_kernel and not head_first
    lengths = cu_seqlens.diff().tolist()
    return _applied(q, k, v, g[0], beta[0], initial_state, initial_state_indices, lengths), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """Applies the rule to one new token of each request; the first axis of ``q``, ``k`` and ``v`` is 1."""
    assert use_qk_l2norm_in_kernel and (softplus_beta, softplus_threshold) == (1.0, 20.0)  # torch's defaults
    decay, strength = log_decay(A_log, a, dt_bias), b.float().sigmoid()
    return _applied(q, k, v, decay, strength, initial_state_source, initial_state_indices, [1] * q.shape[1])


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logarithms of the decays, float32, and the writing strengths, both ``[1, tokens, value heads]``."""
    return log_decay(A_log, a, dt_bias)[None], b.float().sigmoid().to(b.dtype)[None]


def _applied(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    strength: Tensor,
    pool: Tensor,
    slots: Tensor,
    lengths: list[int],
) -> Tensor:
    slots = slots.long()
    segments = Segments.of(lengths)
    before = pool[slots].float().transpose(-1, -2)
    outputs, states = gated_delta_rule(q[0], k[0], v[0], decay, strength, segments, before)
    pool[slots] = states.transpose(-1, -2).to(pool.dtype)
    return outputs.to(v.dtype)[None]
