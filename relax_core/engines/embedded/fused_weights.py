"""The embedded engine's weights, fused into few large matrices; the Hugging Face tensors are views into the matrices.

The module also computes products of tokens with these weights, and mixture-of-experts layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.contracts.family import DeltaNet, ExpertLayout, Experts
from relax_core.engines.asgi_server import clipped
from relax_core.engines.embedded.half_products import HalfMatrix, computing_dtype, pack_all
from relax_core.engines.embedded.model_config import ModelConfig
from relax_core.families.architecture import AudioTower, VisionTower

# A transposed view [in, out]; on processors with slow bfloat16 products, a HalfMatrix.
Matrix = Tensor | HalfMatrix
WEIGHT_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}  # allowed dtypes of tensors in an update


class AttentionWeights(NamedTuple):
    """Holds the weights of one layer's attention.

    The two halves of the rotated part of each query and key head are interleaved, also in biases and norms. Rotary
    embedding is then one complex product. Dot products and norms do not depend on the order. If the attention has an
    output gate, the gates' heads come before the query heads.
    """

    qkv_t: Matrix  # [hidden, (gates + heads + 2 * kv_heads) * head_dim]
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim], float32
    output_t: Matrix  # [heads * head_dim, hidden]


class DeltaNetWeights(NamedTuple):
    """Holds the weights of one layer's gated delta net. The norm and the weights of the decay are float32."""

    into_t: Matrix  # [hidden, channels + values + 2 * value_heads]: convolved, gate, writing strength, decay
    convolution: Tensor  # [channels, kernel]
    a_log: Tensor  # [value_heads]
    dt_bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    output_t: Matrix  # [values, hidden]


class LayerWeights(NamedTuple):
    """Holds one layer's weights. All norms are float32. `Target.scale` is already multiplied into the norms."""

    input_norm: Tensor  # [hidden]
    mixer: AttentionWeights | DeltaNetWeights
    mlp_norm: Tensor  # [hidden]
    mlp: DenseWeights | ExpertWeights


class Target(NamedTuple):
    """Describes the part of the fused weights that one Hugging Face tensor is copied to.

    ``shape`` is the tensor's shape in the file. ``order``, if given, has the indices of the tensor's rows in the order
    of the view. ``view`` gets the tensor after ``reshape(view_shape)``, plus ``shift``, times ``scale``. The scale of a
    norm is the root of its width, because the model computes x / |x| and not x / rms(x). The scale of a query norm is
    1, because attention divides by this root. The shift of a zero-centred norm is 1.
    """

    shape: tuple[int, ...]
    view_shape: tuple[int, ...]
    view: Tensor
    scale: float = 1.0
    shift: float = 0.0
    order: Tensor | None = None


def _interleaved(dim: int, rotated: int) -> Tensor:
    """Returns the indices of a head's dimensions in the order of the fused weights, int64 ``[dim]``."""
    pairs = torch.arange(rotated).view(2, -1).t().flatten()
    return torch.cat([pairs, torch.arange(rotated, dim)])


def _row_order(heads: int, dim: int, inside: Tensor, *, gates: bool) -> Tensor:
    """Returns the indices of a projection's rows in the order of the fused weights, int64 ``[rows]``.

    With ``gates``, the file has a query and a gate for each head in turn. The fused weights have all gates first.
    """
    per_head = 2 * dim if gates else dim
    first = torch.arange(heads)[:, None] * per_head
    order = (first + inside).flatten()
    return torch.cat([(first + dim + torch.arange(dim)).flatten(), order]) if gates else order


class FusedWeights:
    """Holds all weights of one model. The weights are zeros until `apply`.

    ``vision`` and ``audio`` are the model's towers, as Hugging Face modules, or None. ``dtype`` is the dtype in which
    the language model is computed (`computing_dtype`).
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._targets: dict[str, Target] = {}
        self._packed: list[HalfMatrix] = []
        self.dtype = computing_dtype(dtype)
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embedding = torch.zeros(vocab, hidden, dtype=dtype)
        self._whole(f"{config.prefix}embed_tokens.weight", self.embedding)
        self.layers = [self._layer(index, config, dtype) for index in range(config.num_layers)]
        self.final_norm = self._norm(f"{config.prefix}norm.weight", config)
        head = self.embedding
        if not config.tie_word_embeddings:
            head = torch.zeros(vocab, hidden, dtype=dtype)
            self._whole(config.output_weight, head)
        self.head_t = self._matrix(head)
        self.vision = None if config.vision is None else self._tower(config.vision, config.vision.vision.prefix, dtype)
        self.audio = None if config.audio is None else self._tower(config.audio, config.audio.audio.prefix, dtype)
        self._ignored = config.ignored_weights
        self.is_copied = config.is_copied

    def _matrix(self, stored: Tensor) -> Matrix:
        """Returns the matrix that `product` multiplies with. ``stored`` is ``[out, in]``."""
        if stored.dtype == self.dtype:
            return stored.t()
        self._packed.append(HalfMatrix(stored))
        return self._packed[-1]

    def _whole(self, name: str, tensor: Tensor, *, scale: float = 1.0, shift: float = 0.0) -> None:
        self._targets[name] = Target(tuple(tensor.shape), tuple(tensor.shape), tensor, scale, shift)

    def _norm(self, name: str, config: ModelConfig) -> Tensor:
        """Adds the norm ``name`` of hidden states and returns its weight, ``[hidden]``."""
        weight = torch.zeros(config.hidden_size)
        self._whole(name, weight, scale=math.sqrt(config.hidden_size), shift=float(config.zero_centered))
        return weight

    def _layer(self, index: int, config: ModelConfig, dtype: torch.dtype) -> LayerWeights:
        hidden, layer = config.hidden_size, f"{config.prefix}layers.{index}."
        mixer: AttentionWeights | DeltaNetWeights
        if config.delta_net is not None and index in config.delta_layers:
            mixer = self._delta_net(f"{layer}linear_attn.", config.delta_net, hidden, dtype)
        else:
            mixer = self._attention(f"{layer}self_attn.", config, dtype)
        input_norm = self._norm(f"{layer}input_layernorm.weight", config)
        mlp_norm = self._norm(f"{layer}post_attention_layernorm.weight", config)
        mlp: DenseWeights | ExpertWeights
        if config.experts is None:
            mlp = self._dense(f"{layer}mlp.", hidden, config.intermediate_size, dtype)
        else:
            mlp = self._experts(f"{layer}mlp.", hidden, config.experts, dtype, layout=config.expert_layout)
        return LayerWeights(input_norm=input_norm, mixer=mixer, mlp_norm=mlp_norm, mlp=mlp)

    def _attention(self, name: str, config: ModelConfig, dtype: torch.dtype) -> AttentionWeights:
        hidden, heads, kv_heads, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        gates = heads if config.output_gate else 0
        width = (gates + heads + 2 * kv_heads) * dim
        projections = {"weight": torch.zeros(width, hidden, dtype=dtype)}
        if config.qkv_bias:
            projections["bias"] = torch.zeros(width, dtype=dtype)
        qk_norm = torch.zeros(heads + kv_heads, dim) if config.qk_norm else None
        output = torch.zeros(hidden, heads * dim, dtype=dtype)
        inside = _interleaved(dim, config.rotary_dim)
        first = 0
        for part, count, scale in (("q", heads, 1.0), ("k", kv_heads, math.sqrt(dim))):
            own_gates = gates if part == "q" else 0
            order = _row_order(count, dim, inside, gates=own_gates > 0)
            for kind, fused in projections.items():
                view = fused[first * dim : (first + own_gates + count) * dim]
                shape = tuple(view.shape)
                self._targets[f"{name}{part}_proj.{kind}"] = Target(shape, shape, view, order=order)
            first += own_gates + count
            if qk_norm is not None:
                norm = qk_norm[:heads] if part == "q" else qk_norm[heads:]
                shift = float(config.zero_centered)
                self._targets[f"{name}{part}_norm.weight"] = Target((dim,), (1, dim), norm, scale, shift, inside)
        for kind, fused in projections.items():
            self._whole(f"{name}v_proj.{kind}", fused[first * dim :])
        self._whole(f"{name}o_proj.weight", output)
        return AttentionWeights(
            self._matrix(projections["weight"]), projections.get("bias"), qk_norm, self._matrix(output)
        )

    def _delta_net(self, name: str, net: DeltaNet, hidden: int, dtype: torch.dtype) -> DeltaNetWeights:
        widths = (net.channels, net.values, net.value_heads, net.value_heads)
        into = torch.zeros(sum(widths), hidden, dtype=dtype)
        for part, rows in zip(("qkv", "z", "b", "a"), into.split(widths), strict=True):
            self._whole(f"{name}in_proj_{part}.weight", rows)
        convolution = torch.zeros(net.channels, net.kernel, dtype=dtype)
        self._targets[f"{name}conv1d.weight"] = Target(
            (net.channels, 1, net.kernel), tuple(convolution.shape), convolution
        )
        a_log, dt_bias, norm = torch.zeros(net.value_heads), torch.zeros(net.value_heads), torch.zeros(net.value_dim)
        output = torch.zeros(hidden, net.values, dtype=dtype)
        for part, tensor in (
            ("A_log", a_log),
            ("dt_bias", dt_bias),
            ("norm.weight", norm),
            ("out_proj.weight", output),
        ):
            self._whole(name + part, tensor)
        return DeltaNetWeights(self._matrix(into), convolution, a_log, dt_bias, norm, self._matrix(output))

    def _dense(self, prefix: str, hidden: int, width: int, dtype: torch.dtype) -> DenseWeights:
        gate_up, down = torch.zeros(2 * width, hidden, dtype=dtype), torch.zeros(hidden, width, dtype=dtype)
        self._whole(f"{prefix}gate_proj.weight", gate_up[:width])
        self._whole(f"{prefix}up_proj.weight", gate_up[width:])
        self._whole(f"{prefix}down_proj.weight", down)
        return DenseWeights(self._matrix(gate_up), self._matrix(down))

    def _experts(
        self, prefix: str, hidden: int, experts: Experts, dtype: torch.dtype, *, layout: ExpertLayout
    ) -> ExpertWeights:
        """Adds a layer's experts in the folder's layout, and the shared expert, if any."""
        router = torch.zeros(experts.count, hidden, dtype=dtype)
        self._whole(f"{prefix}gate.weight", router)
        shared: DenseWeights | None = None
        shared_gate = torch.zeros(1, hidden, dtype=dtype)
        if experts.shared_width:
            shared = self._dense(f"{prefix}shared_expert.", hidden, experts.shared_width, dtype)
            self._whole(f"{prefix}shared_expert_gate.weight", shared_gate)
        if layout is ExpertLayout.apart:
            dense = [
                self._dense(f"{prefix}experts.{expert}.", hidden, experts.width, dtype)
                for expert in range(experts.count)
            ]
        else:
            gate_up = torch.zeros(experts.count, 2 * experts.width, hidden, dtype=dtype)
            down = torch.zeros(experts.count, hidden, experts.width, dtype=dtype)
            for part, stored in (("gate_up_proj", gate_up), ("down_proj", down)):
                transposed = layout is ExpertLayout.transposed
                self._whole(f"{prefix}experts.{part}", stored.transpose(1, 2) if transposed else stored)
            dense = [
                DenseWeights(self._matrix(expert_gate_up), self._matrix(expert_down))
                for expert_gate_up, expert_down in zip(gate_up, down, strict=True)
            ]
        return ExpertWeights(self._matrix(router), dense, shared, self._matrix(shared_gate))

    def _tower(self, tower: VisionTower | AudioTower, prefix: str, dtype: torch.dtype) -> torch.nn.Module:
        """Builds a tower, and adds its parameters as targets under their Hugging Face names."""
        from relax_core.families.tower_passes import build_tower  # imports transformers

        module = build_tower(tower, dtype=dtype).eval().requires_grad_(False)
        for name, parameter in module.named_parameters():
            self._whole(prefix + name, parameter.detach().zero_())
        return module

    @property
    def _max_elements(self) -> int:
        """Returns the number of elements of the largest tensor."""
        return max(math.prod(target.shape) for target in self._targets.values())

    def checked(self, tensors: Iterable[tuple[str, Tensor]], *, held: Collection[str] = ()) -> dict[str, Tensor]:
        """Checks an update and returns its tensors by name. The update may lack tensors in ``held``.

        Raises ValueError with the missing, unknown and misshapen tensors.
        """
        found = {name: tensor for name, tensor in tensors if name not in self._ignored and not self.is_copied(name)}
        faults = [f"missing: {name}" for name in self._targets if name not in found and name not in held]
        for name, tensor in found.items():
            if (fault := self.fault(name, tensor.shape, tensor.dtype)) is not None:
                faults.append(fault)
        if faults:
            raise ValueError(f"weights do not fit the model ({len(faults)} faults): " + "; ".join(faults[:20]))
        return found

    def fault(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> str | None:
        """Returns why a tensor of an update does not fit the model; None if it fits."""
        target = self._targets.get(name)
        if name in self._ignored:  # `checked` ignores this tensor, but its size is limited, too
            if len(shape) > 2 or not 0 <= math.prod(shape) <= self._max_elements:
                return f"misshapen: {name} is {clipped(str(list(shape)))}, larger than any tensor of the model"
        elif target is None:
            return f"unknown: {clipped(name)}"
        elif tuple(shape) != target.shape:
            return f"misshapen: {name} is {clipped(str(list(shape)))}, the model has {list(target.shape)}"
        if dtype not in WEIGHT_DTYPES:
            return f"wrong dtype: {name} is {dtype}, weights are floating point: {sorted(map(str, WEIGHT_DTYPES))}"
        return None

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies a checked update into the weights."""
        with torch.inference_mode():
            for name, tensor in tensors.items():
                target = self._targets[name]
                if target.order is not None:
                    tensor = tensor.index_select(0, target.order)
                target.view.copy_(tensor.reshape(target.view_shape))
                if target.shift:
                    target.view.add_(target.shift)
                if target.scale != 1.0:
                    target.view.mul_(target.scale)
            if self._packed:
                pack_all(self._packed)


ONEDNN_FROM = 1 << 21  # multiply-adds from which oneDNN is used; MKL needs about 40 µs for these
# Token counts are padded to a multiple of _STEP: oneDNN takes 0.4 ms to prepare a new shape, and caches 1,024 shapes.
_STEP = 64


def product(tokens: Tensor, weight_t: Matrix) -> Tensor:
    """Returns ``tokens`` ``[tokens, in]`` times ``weight_t`` ``[in, out]``: ``[tokens, out]``."""
    if isinstance(weight_t, HalfMatrix):
        return weight_t.product(tokens)
    if _for_onednn(tokens, weight_t):
        return _onednn(tokens, weight_t)
    return torch.mm(tokens, weight_t)


def add_product(x: Tensor, tokens: Tensor, weight_t: Matrix) -> Tensor:
    """Returns the `product` plus ``x``, which is ``[tokens, out]`` or, to add it to every token, ``[out]``."""
    if isinstance(weight_t, HalfMatrix):
        return weight_t.product(tokens).add_(x)
    if _for_onednn(tokens, weight_t):
        return _onednn(tokens, weight_t).add_(x)
    return torch.addmm(x, tokens, weight_t)


def _for_onednn(tokens: Tensor, weight_t: Tensor) -> bool:
    """Returns True for large float32 products of enough tokens. For bfloat16, torch already uses oneDNN.

    With fewer tokens than `_STEP`, most of the product would be padding.
    """
    count = tokens.shape[0]
    return count >= _STEP and count * weight_t.numel() >= ONEDNN_FROM and tokens.dtype == torch.float32


def _onednn(tokens: Tensor, weight_t: Tensor) -> Tensor:
    count = tokens.shape[0]
    if over := count % _STEP:
        tokens = F.pad(tokens, (0, 0, 0, _STEP - over))
    found: Tensor = torch.ops.mkldnn._linear_pointwise(tokens, weight_t.t(), None, "none", [], "")
    return found[:count]


class DenseWeights(NamedTuple):
    """Holds the weights of a gated feed-forward network. Fields with the suffix ``_t`` are transposed views."""

    gate_up_t: Matrix  # [hidden, 2 * intermediate]
    down_t: Matrix  # [intermediate, hidden]


class ExpertWeights(NamedTuple):
    """Holds one layer's router and experts in the model's dtype. All tokens use the expert ``shared``."""

    router_t: Matrix  # [hidden, experts]
    each: list[DenseWeights]
    shared: DenseWeights | None
    shared_gate_t: Matrix  # [hidden, 1]


def choose_experts(tokens: Tensor, router_t: Matrix, experts: Experts) -> tuple[Tensor, Tensor]:
    """Returns router weights and chosen experts, both ``[tokens, per_token]``, by the rule of Qwen3-MoE.

    The rule computes the softmax over all experts in float32, and chooses the ``per_token`` most likely experts, most
    likely first. ``tokens`` is ``[tokens, hidden]``. The weights have the dtype of ``tokens``; the experts are int64.
    """
    scores = product(tokens, router_t).softmax(-1, dtype=torch.float32)
    weights, chosen = scores.topk(experts.per_token, -1)
    if experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(tokens.dtype), chosen


def mix_experts(
    tokens: Tensor, weights: Tensor, chosen: Tensor, mlp: ExpertWeights, *, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns the weighted sum of the chosen experts' outputs plus the shared expert's output, ``[tokens, hidden]``.

    Tokens are sorted by expert, and each chosen expert computes one product. From a hundred tokens on, this was faster
    at every measured model size than one product over all experts, and than products that are padded to the busiest
    expert. For large models, it is the only affordable method.
    """
    per_token = chosen.shape[1]
    flat = chosen.view(-1)
    order = flat.argsort(stable=True)
    owners = order.div(per_token, rounding_mode="floor")
    sorted_tokens = tokens.index_select(0, owners)
    outputs = torch.empty_like(sorted_tokens)
    start = 0
    for expert, count in enumerate(flat.bincount(minlength=len(mlp.each)).tolist()):
        if count:
            end = start + count
            outputs[start:end] = feed_forward(sorted_tokens[start:end], mlp.each[expert], activation=activation)
            start = end
    outputs.mul_(weights.view(-1).index_select(0, order)[:, None])
    mixed = torch.zeros_like(tokens).index_add_(0, owners, outputs)
    if mlp.shared is not None:
        gate = product(tokens, mlp.shared_gate_t).sigmoid_()
        mixed.addcmul_(gate, feed_forward(tokens, mlp.shared, activation=activation))
    return mixed


def feed_forward(tokens: Tensor, weights: DenseWeights, *, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a gated feed-forward network's output, ``[tokens, hidden]``."""
    gate, up = product(tokens, weights.gate_up_t).chunk(2, -1)
    return product(activation(gate).mul_(up), weights.down_t)
