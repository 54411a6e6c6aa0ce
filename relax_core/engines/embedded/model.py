"""A dense Qwen3's forward pass over flat rows of tokens; attention is the caller's."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.engines.embedded.model_config import ModelConfig
from relax_core.engines.embedded.weights import FusedWeights

# (layer, q [rows, heads, dim], k [rows, kv_heads, dim], v like k) -> [rows, heads * dim]; q comes divided by sqrt(dim)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Qwen3Model:
    """Rows of different samples and positions go through together: only ``attend`` knows who sees whom."""

    def __init__(self, config: ModelConfig, weights: FusedWeights, *, context_length: int) -> None:
        self.config = config
        self.weights = weights
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(context_length, dtype=torch.float32), 1.0 / config.rope_theta**half)
        self._rotation = torch.polar(torch.ones_like(angles), angles)[:, None]  # [positions, 1, dim / 2] complex
        self._floor = torch.tensor(math.sqrt(config.rms_norm_eps * config.hidden_size))
        self._head_floor = torch.tensor(math.sqrt(config.rms_norm_eps * config.head_dim))

    def _norm(self, x: Tensor, weight: Tensor, floor: Tensor) -> Tensor:
        """x / sqrt(|x|^2 + floor^2) * weight over the last dimension, in float32: RMSNorm with ``weight`` scaled by the
        root of the width and ``floor`` = sqrt(eps * width). Half the operators of torch's own."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return x.div(length.hypot_(floor)).mul_(weight)

    def _rotate(self, heads: Tensor, rotation: Tensor) -> Tensor:
        """Rotary embedding of float32 ``[rows, heads, dim]`` whose halves are interleaved."""
        pairs = torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotation).view(heads.shape)

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """``ids``, ``positions`` int64 ``[rows]`` → the last layer's output, not yet normed, ``[rows, hidden]``."""
        config, dtype = self.config, self.weights.embedding.dtype
        shape = (ids.shape[0], -1, config.head_dim)
        heads, kv_heads, rotated = config.num_heads, config.num_kv_heads, config.num_heads + config.num_kv_heads
        rotation = self._rotation.index_select(0, positions)
        x = F.embedding(ids, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            normed = self._norm(x, layer.input_norm, self._floor).to(dtype)
            qk, v = F.linear(normed, layer.qkv).view(shape).split_with_sizes((rotated, kv_heads), 1)
            qk = self._rotate(self._norm(qk, layer.qk_norm, self._head_floor), rotation).to(dtype)
            q, k = qk.split_with_sizes((heads, kv_heads), 1)
            x = torch.addmm(x, attend(index, q, k, v), layer.output_t)
            normed = self._norm(x, layer.mlp_norm, self._floor).to(dtype)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down_t)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` → float32 ``[rows, vocab]``, a tensor that the caller may write to."""
        normed = self._norm(hidden, self.weights.final_norm, self._floor).to(hidden.dtype)
        return F.linear(normed, self.weights.head).float()
