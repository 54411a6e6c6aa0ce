"""Runs the forward pass of all architectures of relax_core/families over flat tokens; callers pass the attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.engines.embedded.fused_weights import (
    AttentionWeights,
    DeltaNetWeights,
    ExpertWeights,
    FusedWeights,
    add_product,
    choose_experts,
    mix_experts,
    product,
)
from relax_core.engines.embedded.model_config import ModelConfig
from relax_core.families.delta_rule import gated_norm, log_decay

# (layer, queries [tokens, heads, dim], keys then values [tokens, 2 * kv_heads, dim]) -> [tokens, heads * dim]. The
# scales of queries and keys already include the division of their product by sqrt(dim).
Attend = Callable[[int, Tensor, Tensor], Tensor]


class Recur(Protocol):
    """Declares the recurrence of a gated delta net. Implementations know the tokens' order and states."""

    def __call__(self, layer: int, mixed: Tensor, convolution: Tensor, decay: Tensor, strength: Tensor, /) -> Tensor:
        """Returns the heads' outputs, float32 ``[tokens, value_heads, value_dim]``.

        ``layer`` is the index among the layers with a gated delta net. ``mixed`` ``[tokens, channels]`` has queries,
        keys and values before the convolution with ``convolution`` ``[channels, kernel]``. ``decay`` (as a logarithm)
        and ``strength`` are ``[tokens, value_heads]``.
        """
        ...


class MediaRows(NamedTuple):
    """Holds the media inputs of one pass.

    ``rows`` are the indices of the tokens that get ``features`` ``[rows, hidden]`` as embeddings. ``deepstack[k]`` is
    added to these tokens after layer k. ``placed`` are the indices of all tokens of sequences with items, and
    ``positions`` ``[3, placed]`` are their rotary positions in time, height and width.
    """

    rows: Tensor
    features: Tensor
    deepstack: Sequence[Tensor]
    placed: Tensor
    positions: Tensor


class LanguageModel:
    """Computes tokens of different samples and positions together. The caller's ``attend`` has the attention mask."""

    def __init__(self, config: ModelConfig, weights: FusedWeights, *, context_length: int) -> None:
        self.config = config
        self.weights = weights
        half = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        frequencies = config.rope.scaled(1.0 / config.rope.theta**half)
        still = config.head_dim // 2 - len(half)  # pairs of numbers that are not rotated
        frequencies = F.pad(frequencies, (0, still))
        angles = torch.outer(torch.arange(context_length, dtype=torch.float32), frequencies)
        # The query's norm includes the division by sqrt(dim). Without norms, queries and keys are scaled by dim **
        # -0.25.
        length = 1.0 if config.qk_norm else config.head_dim**-0.25
        self._rotation = torch.polar(torch.full_like(angles, length), angles)[:, None]  # [positions, 1, dim / 2]
        self._frequencies, self._length = frequencies, length
        self._axes = torch.tensor([*config.rope.axes(len(half)), *[0] * still])
        self._floor = torch.tensor(math.sqrt(config.rms_norm_eps * config.hidden_size))
        self._head_floor = torch.tensor(math.sqrt(config.rms_norm_eps * config.head_dim))
        self._activation = getattr(F, config.activation)
        self._dtype = weights.dtype
        places = {
            layer: place for kind in (config.attention_layers, config.delta_layers) for place, layer in enumerate(kind)
        }
        self._places = [places[layer] for layer in range(config.num_layers)]  # index among layers of its kind
        self._narrow = self._dtype != torch.float32  # float32 weights need no cast, and even a null cast costs time

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns x / sqrt(|x|^2 + floor^2) * weight over the last dimension, computed in float32.

        The result is RMSNorm if ``weight`` is scaled by the root of the width and floor = sqrt(eps * width). This form
        needs half the operators of torch's RMSNorm.
        """
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        normed = x.div(length.hypot_(self._floor)).mul_(weight)
        return normed.to(self._dtype) if self._narrow else normed

    def _norm_and_rotate(self, heads: Tensor, weight: Tensor | None, rotation: Tensor) -> None:
        """Norms each head, if ``weight`` is given, then applies the rotary embedding; both in place.

        ``heads`` is float32 ``[tokens, heads, dim]``; the two halves of each head are interleaved.
        """
        if weight is not None:
            length = torch.linalg.vector_norm(heads, dim=-1, keepdim=True)
            heads.div_(length.hypot_(self._head_floor)).mul_(weight)
        heads.view(torch.complex64).mul_(rotation)

    def _rotation_of(self, positions: Tensor) -> Tensor:
        """Returns the rotation at ``positions`` ``[3, tokens]``, complex64 ``[tokens, 1, head_dim / 2]``."""
        angles = positions.float().index_select(0, self._axes).t() * self._frequencies
        return torch.polar(torch.full_like(angles, self._length), angles)[:, None]

    def _rotations(self, positions: Tensor, media: MediaRows | None) -> Tensor:
        """Returns the rotation of each token. Integer positions that are equal on all axes are read from the table."""
        if positions.is_floating_point():
            return self._rotation_of(positions.expand(3, -1))
        rotation = self._rotation.index_select(0, positions)
        if media is not None:
            rotation.index_copy_(0, media.placed, self._rotation_of(media.positions))
        return rotation

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        recur: Recur | None = None,
        routes: list[Tensor] | None = None,
        wanted: Tensor | None = None,
        media: MediaRows | None = None,
    ) -> Tensor:
        """Returns the last layer's output before the final norm, ``[tokens, hidden]``.

        ``ids`` are int64 ``[tokens]``. ``positions`` are the rotary positions: int64 below the context length, or
        float64. ``recur`` is required for a model with a gated delta net. ``media`` has the images and videos of the
        tokens. If ``routes`` is given, the experts of each layer, int64 ``[tokens, per_token]``, are appended to it.
        ``wanted``, if given, has the int64 indices of the tokens with a requested output: after its attention, the last
        layer is computed only for these tokens.
        """
        config = self.config
        rotation = self._rotations(positions, media)
        x = self.weights.embedding.index_select(0, ids)
        if x.dtype != self._dtype:
            x = x.to(self._dtype)
        deepstack: Sequence[Tensor] = () if media is None else media.deepstack
        if media is not None:
            x.index_copy_(0, media.rows, media.features.to(x.dtype))
        # After the attention of layer ``last``, only the wanted tokens are computed; -1 if all layers have deepstack
        # rows.
        last = config.num_layers - 1 if len(deepstack) < config.num_layers else -1
        for index, layer in enumerate(self.weights.layers):
            normed = self._norm(x, layer.input_norm)
            mixer, place = layer.mixer, self._places[index]
            if isinstance(mixer, AttentionWeights):
                mixed = self._attend(normed, mixer, rotation, partial(attend, place))
            else:
                assert recur is not None, "a model with a gated delta net is given its states"
                mixed = self._recur(normed, mixer, partial(recur, place))
            if wanted is not None and index == last:
                x, mixed = x.index_select(0, wanted), mixed.index_select(0, wanted)
            x = add_product(x, mixed, mixer.output_t)
            normed = self._norm(x, layer.mlp_norm)
            if isinstance(layer.mlp, ExpertWeights):
                x = x + self._experts(normed, layer.mlp, routes)
            else:
                gate, up = product(normed, layer.mlp.gate_up_t).chunk(2, 1)
                x = add_product(x, self._activation(gate).mul_(up), layer.mlp.down_t)
            if media is not None and index < len(deepstack):
                x.index_add_(0, media.rows, deepstack[index].to(x.dtype))
        return x if wanted is None or last >= 0 else x.index_select(0, wanted)

    def _attend(
        self, normed: Tensor, mixer: AttentionWeights, rotation: Tensor, attend: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Returns the attention of ``[tokens, hidden]`` before the output projection, ``[tokens, heads * dim]``."""
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        gates = heads if config.output_gate else 0
        if mixer.qkv_bias is None:
            qkv = product(normed, mixer.qkv_t)
        else:
            qkv = add_product(mixer.qkv_bias, normed, mixer.qkv_t)
        qkv = qkv.view(normed.shape[0], -1, config.head_dim)
        gate = qkv.narrow(1, 0, gates).flatten(1).sigmoid() if gates else None
        if self._narrow:
            qkv = qkv.float()
        self._norm_and_rotate(qkv.narrow(1, gates, heads + kv_heads), mixer.qk_norm, rotation)
        if self._narrow:
            qkv = qkv.to(self._dtype)
        attended = attend(qkv.narrow(1, gates, heads), qkv.narrow(1, gates + heads, 2 * kv_heads))
        return attended if gate is None else attended * gate

    def _recur(self, normed: Tensor, mixer: DeltaNetWeights, recur: Callable[..., Tensor]) -> Tensor:
        """Returns the gated delta net of ``[tokens, hidden]`` before the output projection, ``[tokens, values]``."""
        net = self.config.delta_net
        assert net is not None
        widths = (net.channels, net.values, net.value_heads, net.value_heads)
        mixed, gate, strength, decay = product(normed, mixer.into_t).split_with_sizes(widths, 1)
        decay = log_decay(mixer.a_log, decay, mixer.dt_bias)
        heads = recur(mixed, mixer.convolution, decay, strength.float().sigmoid())
        gate = gate.unflatten(1, (net.value_heads, net.value_dim))
        return gated_norm(heads.to(self._dtype), gate, mixer.norm, eps=self.config.rms_norm_eps).flatten(1)

    def _experts(self, tokens: Tensor, mlp: ExpertWeights, routes: list[Tensor] | None) -> Tensor:
        assert self.config.experts is not None
        weights, chosen = choose_experts(tokens, mlp.router_t, self.config.experts)
        if routes is not None:
            routes.append(chosen)
        return mix_experts(tokens, weights, chosen, mlp, activation=self._activation)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 logits ``[tokens, vocab]`` for ``[tokens, hidden]``. The caller may overwrite the logits."""
        logits = product(self._norm(hidden, self.weights.final_norm), self.weights.head_t)
        return logits.float() if self._narrow else logits
