"""A dense Qwen3's forward pass over flat rows of tokens; attention is the caller's."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.engines.embedded.model_config import ModelConfig
from relax_core.engines.embedded.weights import FusedWeights

# (layer, q [rows, heads, dim], k [rows, kv_heads, dim], v like k) -> [rows, heads * dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Qwen3Model:
    """Rows of different samples and positions go through together: only ``attend`` knows who sees whom."""

    def __init__(self, config: ModelConfig, weights: FusedWeights, *, context_length: int) -> None:
        self.config = config
        self.weights = weights
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(context_length, dtype=torch.float32), 1.0 / config.rope_theta**half)
        self._rotation = torch.polar(torch.ones_like(angles), angles)[:, None]  # [positions, 1, dim / 2] complex

    def _rotate(self, heads: Tensor, rotation: Tensor) -> Tensor:
        """Rotary embedding of ``[rows, heads, dim]`` whose halves are interleaved."""
        pairs = heads.float().view(*heads.shape[:-1], -1, 2)
        return torch.view_as_real(torch.view_as_complex(pairs) * rotation).view(heads.shape).to(heads.dtype)

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """``ids``, ``positions`` int64 ``[rows]`` → the last layer's output, not yet normed, ``[rows, hidden]``."""
        config, eps = self.config, self.config.rms_norm_eps
        rows, width, dim = ids.shape[0], (config.hidden_size,), (config.head_dim,)
        query, rotated = config.num_heads, config.num_heads + config.num_kv_heads
        rotation = self._rotation[positions]
        x = F.embedding(ids, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            qkv = F.linear(F.rms_norm(x, width, layer.input_norm, eps), layer.qkv).view(rows, -1, config.head_dim)
            qk = F.rms_norm(qkv[:, :rotated], dim, None, eps).mul_(layer.qk_norm)
            qk = self._rotate(qk, rotation)
            x = torch.addmm(x, attend(index, qk[:, :query], qk[:, query:], qkv[:, rotated:]), layer.output_t)
            gate, up = F.linear(F.rms_norm(x, width, layer.mlp_norm, eps), layer.gate_up).chunk(2, -1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down_t)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` → float32 ``[rows, vocab]``, a tensor that the caller may write to."""
        normed = F.rms_norm(hidden, (self.config.hidden_size,), self.weights.final_norm, self.config.rms_norm_eps)
        return F.linear(normed, self.weights.head).float()
