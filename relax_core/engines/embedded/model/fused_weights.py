"""Holds the model's weights, fused for few and large products, with the Hugging Face tensors as views into them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from relax_core.contracts.family import Experts
from relax_core.engines.embedded.http.asgi import clipped
from relax_core.engines.embedded.model.model_config import ModelConfig
from relax_core.engines.embedded.model.moe_layer import ExpertWeights
from relax_core.families.architecture import OUTPUT_WEIGHT, VisionTower

WEIGHT_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}  # dtypes of an update's tensors


class DenseWeights(NamedTuple):
    """Holds one layer's feed-forward weights; in this module a name that ends in ``_t`` is a transposed view."""

    gate_up_t: Tensor  # [hidden, 2 * intermediate]
    down_t: Tensor  # [intermediate, hidden]


class LayerWeights(NamedTuple):
    """Holds one layer's weights.

    Query and key heads, their biases and norms are stored with the two halves of each head interleaved, so that rotary
    embedding is one complex product. Dot products and norms do not depend on the order. All norms are float32 and are
    multiplied by `Target.scale`.
    """

    input_norm: Tensor  # [hidden]
    qkv_t: Tensor  # [hidden, (heads + 2 * kv_heads) * head_dim]
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    output_t: Tensor  # [heads * head_dim, hidden]
    mlp_norm: Tensor  # [hidden]
    mlp: DenseWeights | ExpertWeights


class Target(NamedTuple):
    """Names the part of the fused weights that one Hugging Face tensor is copied to.

    ``view`` gets the tensor after ``reshape(view_shape)``, times ``scale``; ``shape`` is its shape in the file. A
    norm's scale is the root of its width, because the model computes x / |x| instead of x / rms(x). The query norm's
    scale is 1, because attention divides by that root.
    """

    shape: tuple[int, ...]
    view_shape: tuple[int, ...]
    view: Tensor
    scale: float = 1.0


class FusedWeights:
    """Holds all weights of one model, which are zeros until `apply`.

    ``tower`` is the vision tower of a model that sees, Hugging Face's module as it is; it is None for other models.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._targets: dict[str, Target] = {}
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embedding = torch.zeros(vocab, hidden, dtype=dtype)
        self._whole(f"{config.prefix}embed_tokens.weight", self.embedding)
        self.layers = [self._layer(index, config, dtype) for index in range(config.num_layers)]
        self.final_norm = torch.zeros(hidden)
        self._whole(f"{config.prefix}norm.weight", self.final_norm, scale=math.sqrt(hidden))
        head = self.embedding
        if not config.tie_word_embeddings:
            head = torch.zeros(vocab, hidden, dtype=dtype)
            self._whole(OUTPUT_WEIGHT, head)
        self.head_t = head.t()
        self.tower = None if config.vision is None else self._tower(config.vision, dtype)
        self._ignored = config.ignored_weights

    def _whole(self, name: str, tensor: Tensor, *, scale: float = 1.0) -> None:
        self._targets[name] = Target(tuple(tensor.shape), tuple(tensor.shape), tensor, scale)

    def _layer(self, index: int, config: ModelConfig, dtype: torch.dtype) -> LayerWeights:
        hidden, half = config.hidden_size, config.head_dim // 2
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        layer = f"{config.prefix}layers.{index}."

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=dtype)

        width = (heads + 2 * kv_heads) * dim
        projections = {"weight": zeros(width, hidden)} | ({"bias": zeros(width)} if config.qkv_bias else {})
        qk_norm = torch.zeros(heads + kv_heads, dim) if config.qk_norm else None
        output = zeros(hidden, heads * dim)
        input_norm, mlp_norm = torch.zeros(hidden), torch.zeros(hidden)
        first = 0
        for part, count, scale in (("q", heads, 1.0), ("k", kv_heads, math.sqrt(dim))):
            for kind, fused in projections.items():
                weight = fused[first * dim : (first + count) * dim]
                view = weight.view(count, half, 2, *weight.shape[1:]).transpose(1, 2)
                self._targets[f"{layer}self_attn.{part}_proj.{kind}"] = Target(
                    tuple(weight.shape), tuple(view.shape), view
                )
            if qk_norm is not None:
                norm = qk_norm[first : first + count].view(count, half, 2).transpose(1, 2)
                self._targets[f"{layer}self_attn.{part}_norm.weight"] = Target((dim,), (1, 2, half), norm, scale)
            first += count
        for kind, fused in projections.items():
            self._whole(f"{layer}self_attn.v_proj.{kind}", fused[first * dim :])
        self._whole(f"{layer}self_attn.o_proj.weight", output)
        self._whole(f"{layer}input_layernorm.weight", input_norm, scale=math.sqrt(hidden))
        self._whole(f"{layer}post_attention_layernorm.weight", mlp_norm, scale=math.sqrt(hidden))
        mlp: DenseWeights | ExpertWeights
        if config.experts is None:
            mlp = self._dense(f"{layer}mlp.", hidden, config.intermediate_size, dtype)
        else:
            mlp = self._experts(f"{layer}mlp.", hidden, config.experts, dtype, fused=config.fused_experts)
        return LayerWeights(
            input_norm=input_norm,
            qkv_t=projections["weight"].t(),
            qkv_bias=projections.get("bias"),
            qk_norm=qk_norm,
            output_t=output.t(),
            mlp_norm=mlp_norm,
            mlp=mlp,
        )

    def _dense(self, prefix: str, hidden: int, width: int, dtype: torch.dtype) -> DenseWeights:
        gate_up, down = torch.zeros(2 * width, hidden, dtype=dtype), torch.zeros(hidden, width, dtype=dtype)
        self._whole(f"{prefix}gate_proj.weight", gate_up[:width])
        self._whole(f"{prefix}up_proj.weight", gate_up[width:])
        self._whole(f"{prefix}down_proj.weight", down)
        return DenseWeights(gate_up.t(), down.t())

    def _experts(self, prefix: str, hidden: int, experts: Experts, dtype: torch.dtype, *, fused: bool) -> ExpertWeights:
        """Adds a layer's experts; with ``fused`` they are two tensors, transposed as in `Family`."""
        router = torch.zeros(experts.count, hidden, dtype=dtype)
        self._whole(f"{prefix}gate.weight", router)
        if fused:
            gate_up = torch.zeros(experts.count, 2 * experts.width, hidden, dtype=dtype)
            down = torch.zeros(experts.count, hidden, experts.width, dtype=dtype)
            self._whole(f"{prefix}experts.gate_up_proj", gate_up.transpose(1, 2))
            self._whole(f"{prefix}experts.down_proj", down.transpose(1, 2))
            return ExpertWeights(router.t(), [one.t() for one in gate_up], [one.t() for one in down])
        each = [self._dense(f"{prefix}experts.{one}.", hidden, experts.width, dtype) for one in range(experts.count)]
        return ExpertWeights(router.t(), [one.gate_up_t for one in each], [one.down_t for one in each])

    def _tower(self, tower: VisionTower, dtype: torch.dtype) -> torch.nn.Module:
        """Builds the vision tower, whose parameters are targets under their Hugging Face names."""
        from relax_core.families.vision.tower import build_tower  # it imports transformers

        module = build_tower(tower, dtype=dtype).eval().requires_grad_(False)
        for name, parameter in module.named_parameters():
            self._whole(tower.vision.prefix + name, parameter.detach().zero_())
        return module

    @property
    def _most_numbers(self) -> int:
        """Returns the number of elements of the largest tensor."""
        return max(math.prod(target.shape) for target in self._targets.values())

    def checked(self, tensors: Iterable[tuple[str, Tensor]], *, held: Collection[str] = ()) -> dict[str, Tensor]:
        """Returns an update's tensors by name; those in ``held`` stay as they are if the update lacks them.

        Raises ValueError that names the missing, unknown and misshapen ones.
        """
        found = {name: tensor for name, tensor in tensors if name not in self._ignored}
        faults = [f"missing: {name}" for name in self._targets if name not in found and name not in held]
        for name, tensor in found.items():
            if (fault := self.fault(name, tensor.shape, tensor.dtype)) is not None:
                faults.append(fault)
        if faults:
            raise ValueError(f"weights do not fit the model ({len(faults)} faults): " + "; ".join(faults[:20]))
        return found

    def fault(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> str | None:
        """Returns why a tensor of an update is not one of the model's, or None if it is."""
        target = self._targets.get(name)
        if name in self._ignored:  # `checked` leaves it out, but its size is bounded too
            if len(shape) > 2 or not 0 <= math.prod(shape) <= self._most_numbers:
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
                target.view.copy_(tensor.reshape(target.view_shape))
                if target.scale != 1.0:
                    target.view.mul_(target.scale)
