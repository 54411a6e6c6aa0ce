"""Builds the Megatron model as chunks of layers that read a tree-packed stream and return hidden states.

A critic has a value head on top of the same layers.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    checkpoint,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor

from relax_core.config.choices import Recompute
from relax_core.config.schema import ParallelConfig
from relax_core.contracts.family import DeltaNet
from relax_core.families.architecture import Architecture
from relax_core.families.towers import Towers
from relax_core.train.device import training_device
from relax_core.train.hf.weight_rules import megatron_arguments, weight_rules
from relax_core.train.model.delta_net import TreeDeltaNet
from relax_core.train.model.media_features import add_towers, with_features
from relax_core.train.model.moe import BalancedRouter, MoeTransformerLayer, number_routers
from relax_core.train.model.tree_attention import TreeBatch

log = logging.getLogger(__name__)


class TreeGPTModel(GPTModel):
    """Computes a GPTModel's forward pass up to the output layer.

    Log-probs are computed from the hidden states and `output_weight` in chunks of rows, so all logits never exist at
    once. The first chunk of layers of a multimodal model has the modules ``vision`` and ``audio`` of the model's
    towers. All chunks have ``towers``, the description of the towers.
    """

    vision: torch.nn.Module | None
    audio: torch.nn.Module | None
    towers: Towers | None
    rotary_axes: Tensor
    _rotary_table: Tensor | None = None

    def rotary(self, tree: TreeBatch) -> Tensor:
        """Returns the rotary angles of this rank's rows, ``[rows, 1, 1, head_dim]``; the table grows by doubling."""
        if tree.rotary is not None:
            half = tree.rotary[self.rotary_axes].t() * self.rotary_pos_emb.inv_freq
            return torch.cat([half, half], dim=-1)[:, None, None]
        if self._rotary_table is None or len(self._rotary_table) <= tree.max_position:
            # Without "packed" the call would return this context-parallel rank's part of a plain sequence.
            self._rotary_table = self.rotary_pos_emb(1 << max(9, tree.max_position.bit_length()), packed_seq=True)
        return self._rotary_table[tree.positions]

    def forward(self, tree: TreeBatch) -> Tensor:
        """Runs the chunk's layers on a stream.

        The last chunk returns the hidden states of this rank's rows after the final norm, ``[rows, hidden]``. They are
        equal on all tensor-parallel ranks. Other chunks return the next chunk's input, ``[rows, 1, hidden]``, with the
        rows split by sequence parallelism.
        """
        embedded: Tensor | None = None
        if self.pre_process:
            embedded = self.embedding(input_ids=tree.token_ids[None], position_ids=None)
            if self.towers is not None:
                embedded, tree = with_features(self, embedded, tree)
            if self.training and torch.is_grad_enabled() and not embedded.requires_grad:
                # Recomputed layers and later pipeline stages compute gradients only if their input requires a gradient.
                embedded.requires_grad_()
        hidden: Tensor = self.decoder(hidden_states=embedded, attention_mask=tree, rotary_pos_emb=self.rotary(tree))
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # Every rank has the whole gradient of the head's input, so the backward pass only selects this rank's rows.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[:, 0]

    def output_weight(self) -> Tensor:
        """Returns the padded output weight ``[vocab / tp, hidden]``.

        A tied output weight is the embedding, or the embedding's copy on another pipeline stage.
        """
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


VALUE_HEAD = "value_head."  # The names of the head's parameters begin with this prefix.


class TreeValueModel(TreeGPTModel):
    """Replaces the output layer by a critic's value head, which returns one number per row."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.value_head = torch.nn.Linear(config.hidden_size, 1)
        torch.nn.init.zeros_(self.value_head.weight)
        torch.nn.init.zeros_(self.value_head.bias)

    def values(self, hidden: Tensor) -> Tensor:
        """Returns the values of the hidden states ``[rows, hidden]``: float32 ``[rows]``, 0 before the first update."""
        weight, bias = self.value_head.weight.float(), self.value_head.bias.float()
        return F.linear(hidden.float(), weight, bias)[:, 0]


class _NoOffset:
    """Stands for 0 in Megatron's sum of a gated unit's linear half and an offset: the sum is the linear half itself.

    The sum with a number would be a further tensor, which autograd keeps for the backward pass.
    """

    def __radd__(self, linear: Tensor) -> Tensor:
        return linear


def transformer_config(
    architecture: Architecture,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    moe_aux_loss_coef: float = 0.0,
) -> TransformerConfig:
    """Builds Megatron's config from the architecture and the layout; fusions that need a GPU library are off."""
    arguments: dict[str, Any] = megatron_arguments(architecture)
    if architecture.experts is not None:
        arguments |= {
            "moe_enable_routing_replay": True,  # Replay has no effect until a micro-batch has experts to replay.
            "moe_router_load_balancing_type": "aux_loss" if moe_aux_loss_coef else "none",
            "moe_aux_loss_coeff": moe_aux_loss_coef,
        }
    arguments["activation_func"] = getattr(F, arguments.pop("activation"))
    pipeline = parallel.pp > 1
    config = TransformerConfig(
        # Variable lengths need this setting in a dense model, too.
        **{"moe_token_dispatcher_type": "alltoall"} | arguments,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.sequence_parallel,
        context_parallel_size=parallel.cp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        # Interleaved stages send in both directions at the same time, and shape messages would reach the wrong
        # receiver.
        variable_seq_lengths=pipeline and parallel.vpp == 1,
        batch_p2p_comm=parallel.vpp == 1,
        deallocate_pipeline_outputs=True,
        moe_grouped_gemm="num_moe_experts" in arguments and has_transformer_engine(),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Gradients are summed over ranks; the trainer divides them by the algorithm's denominator.
        calculate_per_token_loss=True,
        use_cpu_initialization=training_device().type == "cpu",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cuda_graph_scope=[],  # The default value logs a deprecation warning.
    )
    config.glu_linear_offset = _NoOffset()
    return config


def build_chunks(
    architecture: Architecture,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    value_head: bool = False,
    moe_aux_loss_coef: float = 0.0,
) -> list[TreeGPTModel]:
    """Builds this rank's uninitialized chunks of layers on this process's device.

    There is one chunk, or several with a virtual pipeline. The weights are loaded later from a Hugging Face folder. If
    ``value_head`` is True the model has no output layer, not even a tied output layer.
    """
    config = transformer_config(architecture, parallel, dtype=dtype, moe_aux_loss_coef=moe_aux_loss_coef)
    if training_device().cuda and not has_transformer_engine():
        experts = "" if architecture.experts is None else ", and the products of a layer's experts run one by one"
        log.warning("transformer_engine is not installed: norms and linear layers are torch's%s", experts)
    chunks = []
    for chunk in range(parallel.vpp):
        vp_stage = chunk if parallel.vpp > 1 else None
        model = (TreeValueModel if value_head else TreeGPTModel)(
            config,
            block_spec(config, architecture, recompute=parallel.recompute, vp_stage=vp_stage),
            padded_vocabulary(architecture.vocab_size, parallel),
            architecture.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            position_embedding_type="rope",
            rotary_base=architecture.rope.theta,
            rotary_percent=architecture.rope.part,
            share_embeddings_and_output_weights=architecture.tie_word_embeddings or value_head,
            vp_stage=vp_stage,
        )
        # Megatron scales frequencies only with Llama 3.1's constants, but a model may have other constants.
        model.rotary_pos_emb.inv_freq = architecture.rope.scaled(model.rotary_pos_emb.inv_freq)
        _mark_shards(model)
        if config.num_moe_experts and parallel.etp != parallel.tp:
            _reduce_experts_apart(model)
        own = training_device().torch
        chunks.append(_in_dtype(model, architecture, dtype).to(device=own))
        model.vision, model.audio, model.towers = None, None, Towers.of(architecture)
        axes = architecture.rope.axes(architecture.rotary_dim // 2)
        model.rotary_axes = torch.tensor(axes).to(own)
        if model.towers is not None and model.pre_process:
            recompute = parallel.recompute is Recompute.full
            add_towers(model, model.towers, dtype=dtype, device=own, recompute=recompute)
    if architecture.experts is not None:
        number_routers(chunks)
    return chunks


def _in_dtype(model: TreeGPTModel, architecture: Architecture, dtype: torch.dtype) -> TreeGPTModel:
    """Converts the model to ``dtype``, except for the parameters that are always float32."""
    kept = {rule.megatron.rsplit(".", 1)[-1] for rule in weight_rules(architecture) if architecture.is_float32(rule.hf)}
    model.to(dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.rsplit(".", 1)[-1] in kept:
            parameter.data = parameter.data.float()
    return model


def padded_vocabulary(words: int, parallel: ParallelConfig) -> int:
    """Returns the number of rows of the embedding, padded to a multiple of the number of tensor-parallel ranks."""
    return -(-words // parallel.tp) * parallel.tp


def _mark_shards(model: torch.nn.Module) -> None:
    """Marks the parameters that tensor parallelism splits; Megatron marks parameters only when it initializes them."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding | RowParallelLinear):
            weight = module.weight
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                dim = 1 if isinstance(module, RowParallelLinear) else 0
                set_tensor_model_parallel_attributes(weight, True, dim, 1)


def _reduce_experts_apart(model: torch.nn.Module) -> None:
    """Makes Megatron reduce the experts' gradients separately, as it does by default only with ep > 1.

    If experts and other layers are split differently (etp, tp), they are replicated over different ranks.
    """
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Returns ``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, ``[…, dim]``; all are float32.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467. On a CPU torch computes its own RMSNorm and the gradient with a
    dozen operators, and each operator reads and writes the whole input. The results of the two implementations differ
    by rounding.
    """
    normed: Tensor = _RmsNorm.apply(x, weight, eps)
    return normed


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Squaring the result of vector_norm would add the rounding of the root, and it is not faster.
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
    """Computes core attention over a tree-packed stream; Megatron passes the `TreeBatch` as attention mask.

    If ``recompute`` is True, the activations of core attention are computed again in the backward pass.
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
    """Saves only the layer's input and computes the layer's activations again in the backward pass.

    Megatron's own recomputation saves all arguments as tensors, and a `TreeBatch` is not a tensor.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer; see `TransformerLayer.forward`."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        forward, hidden = super().forward, kwargs.pop("hidden_states")
        return checkpoint(lambda hidden: forward(*args, hidden_states=hidden, **kwargs), False, hidden)


class RecomputedMoeTransformerLayer(RecomputedLayer, MoeTransformerLayer):
    """Recomputes the activations of a layer with experts; the router gets the micro-batch in both passes."""


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """Computes RMSNorm and marks its gradient as partial under sequence parallelism.

    Megatron's local norm rejects sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.config = config
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension; a zero-centred norm multiplies by 1 + weight, in float32.

        A zero-centred norm uses torch's operator, because the adjacent gated delta nets amplify rounding differences.
        """
        assert self.eps is not None, "the constructor sets it"
        if self.config.layernorm_zero_centered_gamma:
            return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)
        if x.dtype == torch.float32 and not training_device().gpu:
            return rms_norm(x, self.weight, eps=self.eps)
        return super().forward(x)


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_GROUPED = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def has_transformer_engine() -> bool:
    """Returns True if this process trains on a GPU with TransformerEngine."""
    return training_device().cuda and importlib.util.find_spec("transformer_engine") is not None


def block_spec(
    config: TransformerConfig, architecture: Architecture, *, recompute: Recompute, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the layers of a model chunk for this process's device.

    The layers are TransformerEngine's if CUDA and TransformerEngine are available, otherwise torch's. ``vp_stage`` is
    the index of the chunk within its stage, or None if a stage has one chunk. Core attention is always
    `TreeCoreAttention`, because it applies the tree's visibility. The architecture's delta layers have a `TreeDeltaNet`
    in place of attention.
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
    """Returns a layer with a gated delta net in place of attention, and with a separate norm before the delta net."""
    into: Any = ColumnParallelLinear
    out: Any = RowParallelLinear
    if has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        into, out = TEColumnParallelLinear, TERowParallelLinear
    settings = {"net": net, "in_proj": into, "out_proj": out, "recompute": recompute is Recompute.selective}
    attention = ModuleSpec(module=TreeDeltaNet, params=settings)
    return replace(layer, submodules=replace(layer.submodules, input_layernorm=norm, self_attention=attention))


def parameter_name(name: str, *, experts: bool, delta_layers: Collection[int] = ()) -> str:
    """Returns a parameter's name in the chosen layers; ``experts`` is True for a mixture of experts.

    TransformerEngine fuses a norm into the linear layer that follows, except before a router and in ``delta_layers``.
    It has the experts of a layer in one module, which computes their matrix products as a group.
    """
    if not has_transformer_engine():
        return name
    if not (delta_layers and (found := _LAYER.search(name)) and int(found[1]) in delta_layers):
        name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if experts:
        return _GROUPED.sub(r".\2.weight\1", name)
    return name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
