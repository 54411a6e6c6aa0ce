"""Chooses the modules of a transformer layer by device, and defines the modules that Megatron does not have."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor

from relax_core.config.choices import Recompute
from relax_core.contracts.family import DeltaNet
from relax_core.families.architecture import Architecture
from relax_core.train.megatron_on_cpu import has_cuda
from relax_core.train.model.delta_net import TreeDeltaNet
from relax_core.train.model.moe import BalancedRouter, MoeTransformerLayer
from relax_core.train.model.tree_attention import TreeBatch


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Returns ``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, ``[…, dim]``; all are float32.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467. On a CPU torch computes its own RMSNorm, and the gradient of it,
    as a dozen operators, each of which reads and writes the whole input. The results differ by rounding.
    """
    normed: Tensor = _RmsNorm.apply(x, weight, eps)
    return normed


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # The square of vector_norm would round the root in between, and is no faster.
        inverse = x.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, inverse, weight = ctx.saved_tensors
        products = (grad * normed).reshape(-1, len(weight))
        along = torch.mv(products, weight).mul_(-1.0 / len(weight)).view(inverse.shape)
        of_x = (grad * weight).addcmul_(normed, along).mul_(inverse)
        return of_x, products.sum(dim=0), None


class TreeCoreAttention(MegatronModule):
    """Computes core attention over a tree-packed stream; it gets the `TreeBatch` as Megatron's attention mask.

    If ``recompute`` is True its activations are not saved but computed again in the backward pass.
    """

    def __init__(
        self, config: TransformerConfig, *, softmax_scale: float | None = None, recompute: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(config=config)
        self.scale, self.recompute = softmax_scale, recompute

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tree: TreeBatch, **kwargs: Any) -> Tensor:
        """Maps query ``[rows, 1, heads, dim]``, key and value ``[rows, 1, groups, dim]`` to ``[rows, 1, hidden]``."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return tree.attend(query[:, 0], key[:, 0], value[:, 0], scale=self.scale)[:, None]

        if self.recompute and torch.is_grad_enabled():
            output = checkpoint(attend, False, query, key, value)
            assert isinstance(output, Tensor)
            return output
        return attend(query, key, value)


class RecomputedLayer(TransformerLayer):
    """Saves only the layer's input and computes the rest again in the backward pass.

    Megatron's own recomputation saves all arguments as tensors, and a `TreeBatch` is not a tensor.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer; see `TransformerLayer.forward`."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        forward, hidden = super().forward, kwargs.pop("hidden_states")
        return checkpoint(lambda hidden: forward(*args, hidden_states=hidden, **kwargs), False, hidden)


class RecomputedMoeTransformerLayer(RecomputedLayer, MoeTransformerLayer):
    """Recomputes the activations of a layer with experts; its router gets the micro-batch in both passes."""


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """Marks the gradient of RMSNorm as partial under sequence parallelism, which Megatron's local norm refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.config = config
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Norms the last dimension; a zero-centred norm multiplies by 1 + its weight, both in float32.

        A zero-centred norm is torch's: it stands beside layers with a state, which amplify differences of rounding.
        """
        assert self.eps is not None, "the constructor sets it"
        if self.config.layernorm_zero_centered_gamma:
            return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)
        if x.dtype == torch.float32:
            return rms_norm(x, self.weight, eps=self.eps)
        return super().forward(x)


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_GROUPED = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def has_transformer_engine() -> bool:
    """Returns True if this process trains on a GPU with TransformerEngine."""
    return has_cuda() and importlib.util.find_spec("transformer_engine") is not None


def block_spec(
    config: TransformerConfig, architecture: Architecture, *, recompute: Recompute, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the layers of a model chunk for this process's device.

    They are TransformerEngine's if CUDA and TransformerEngine are available, and torch's otherwise. ``vp_stage`` is the
    index of the chunk within its stage, or None if a stage has one chunk. Core attention is `TreeCoreAttention` on both
    devices, because it applies the tree's visibility; the architecture's delta layers have a `TreeDeltaNet` instead.
    """
    layer: ModuleSpec
    if has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        norm: Any = TENorm
    else:
        layer = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
        )
        norm = SequenceParallelRMSNorm
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        for owner in (parts, attention):
            for name, module in vars(owner).items():
                if module is WrappedTorchNorm:
                    setattr(owner, name, norm)
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=TreeCoreAttention, params={"recompute": recompute is Recompute.selective}
    )
    experts = config.num_moe_experts is not None
    if experts:
        layer.submodules.mlp.submodules.router = BalancedRouter
    if recompute is Recompute.full:
        layer.module = RecomputedMoeTransformerLayer if experts else RecomputedLayer
    elif experts:
        layer.module = MoeTransformerLayer
    layers = [layer] * get_num_layers_to_build(config, vp_stage=vp_stage)
    if architecture.delta_net is not None:
        linear = _with_delta_net(layer, architecture.delta_net, norm=norm, recompute=recompute)
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        kinds = {True: linear, False: layer}
        layers = [kinds[first + index in architecture.delta_layers] for index in range(len(layers))]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _with_delta_net(layer: ModuleSpec, net: DeltaNet, *, norm: Any, recompute: Recompute) -> ModuleSpec:
    """Returns a layer with a gated delta net in place of its attention, and with a norm of its own before it."""
    into: Any = ColumnParallelLinear
    out: Any = RowParallelLinear
    if has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        into, out = TEColumnParallelLinear, TERowParallelLinear
    settings = {"net": net, "in_proj": into, "out_proj": out, "recompute": recompute is Recompute.selective}
    attention = ModuleSpec(module=TreeDeltaNet, params=settings)
    return replace(layer, submodules=replace(layer.submodules, input_layernorm=norm, self_attention=attention))


def parameter_name(name: str, *, experts: bool, delta_layers: Collection[int] = ()) -> str:
    """Returns the name that the chosen layers give a parameter; ``experts`` is True for a mixture of experts.

    TransformerEngine keeps a norm inside the linear layer after it, except before a router and in ``delta_layers``. Its
    grouped matrix product keeps the experts of a layer in one module.
    """
    if not has_transformer_engine():
        return name
    if not (delta_layers and (found := _LAYER.search(name)) and int(found[1]) in delta_layers):
        name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if experts:
        return _GROUPED.sub(r".\2.weight\1", name)
    return name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
