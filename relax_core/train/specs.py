"""Which modules a transformer layer is made of, chosen by device in one function, and the two modules of our own."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from relax_core.train.device import has_cuda
from relax_core.train.tree_attention import TreeBatch


class TreeCoreAttention(MegatronModule):
    """Core attention over a tree-packed stream. Takes the `TreeBatch` where Megatron passes its attention mask."""

    def __init__(self, config: TransformerConfig, *, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tree: TreeBatch, **kwargs: Any) -> Tensor:
        """``query`` ``[rows, 1, heads, dim]``; key, value ``[rows, 1, groups, dim]`` → ``[rows, 1, hidden]``."""
        return tree.attend(query[:, 0], key[:, 0], value[:, 0], scale=self.scale)[:, None]


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that tells Megatron whether its gradient is partial; Megatron's own local norm refuses to."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.config = config
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def has_transformer_engine() -> bool:
    return has_cuda() and importlib.util.find_spec("transformer_engine") is not None


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers for this process's device: TransformerEngine's where CUDA and it are there, else torch's.

    Core attention is ours on both: only it knows the tree mask.
    """
    layer: ModuleSpec
    if has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        norm: Any = TENorm
    else:
        layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        norm = SequenceParallelRMSNorm
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        for owner in (parts, attention):
            for name, module in vars(owner).items():
                if module is WrappedTorchNorm:
                    setattr(owner, name, norm)
    layer.submodules.self_attention.submodules.core_attention = TreeCoreAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=norm)


def parameter_name(name: str) -> str:
    """The name that the chosen spec gives a parameter; TransformerEngine keeps two norms inside its linear layers."""
    if not has_transformer_engine():
        return name
    return name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight").replace(
        ".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight"
    )
