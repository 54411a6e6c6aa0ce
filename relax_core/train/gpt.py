"""The Megatron model: a GPTModel that reads a tree-packed stream and returns hidden states; for a critic, a value head
on top of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from relax_core.train.device import has_cuda
from relax_core.train.models.family import Family, HfConfig, Shard
from relax_core.train.specs import block_spec, parameter_name
from relax_core.train.tree_attention import TreeBatch


class TreeGPTModel(GPTModel):
    """GPTModel whose forward ends before the output layer: log-probs are computed chunk by chunk from its hidden
    states and `output_weight`, so logits never exist whole."""

    _rotary_table: Tensor | None = None

    def rotary(self, tree: TreeBatch) -> Tensor:
        """Rotary angles of the stream's rows, ``[rows, 1, 1, head_dim]``; the table grows by doubling."""
        if self._rotary_table is None or len(self._rotary_table) <= tree.max_position:
            self._rotary_table = self.rotary_pos_emb(1 << max(9, tree.max_position.bit_length()))
        return self._rotary_table[tree.positions]

    def forward(self, tree: TreeBatch) -> Tensor:
        """Hidden states after the final norm, ``[rows, hidden]``."""
        hidden = self.decoder(
            hidden_states=self.embedding(input_ids=tree.token_ids[None], position_ids=None),
            attention_mask=tree,
            rotary_pos_emb=self.rotary(tree),
        )
        return hidden[:, 0]

    def output_weight(self) -> Tensor:
        """``[vocab, hidden]``; the embedding itself when tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


VALUE_HEAD = "value_head."  # how the names of its parameters begin


class TreeValueModel(TreeGPTModel):
    """A critic: the same trunk, and one number a row in the place of the output layer."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.value_head = torch.nn.Linear(config.hidden_size, 1)
        torch.nn.init.zeros_(self.value_head.weight)
        torch.nn.init.zeros_(self.value_head.bias)

    def values(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` → float32 ``[rows]``; 0 everywhere before the first update."""
        weight, bias = self.value_head.weight.float(), self.value_head.bias.float()
        return F.linear(hidden.float(), weight, bias)[:, 0]


def transformer_config(family: Family, hf_config: HfConfig, *, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's config: the family's arguments and ours. Every fusion that needs a GPU library is off."""
    arguments: dict[str, Any] = family.transformer_arguments(hf_config)
    arguments["activation_func"] = getattr(F, arguments.pop("activation"))
    return TransformerConfig(
        **arguments,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Gradients are summed over ranks; we divide by the algorithm's own denominator.
        calculate_per_token_loss=True,
        use_cpu_initialization=not has_cuda(),
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cuda_graph_scope=[],  # its own default warns that it is deprecated
    )


def build_model(
    family: Family, hf_config: HfConfig, *, dtype: torch.dtype, value_head: bool = False
) -> TreeGPTModel | TreeValueModel:
    """An uninitialised model on this process's device; its weights come from a Hugging Face folder.

    With ``value_head`` it has no output layer of its own, tied or not.
    """
    config = transformer_config(family, hf_config, dtype=dtype)
    shape = family.shape(hf_config)
    model = (TreeValueModel if value_head else TreeGPTModel)(
        config,
        block_spec(config),
        shape.vocab_size,
        shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=shape.rotary_base,
        share_embeddings_and_output_weights=shape.tied_embeddings or value_head,
    )
    _mark_shards(model, family, hf_config)
    return model.to(device="cuda" if has_cuda() else "cpu", dtype=dtype)


def _mark_shards(model: torch.nn.Module, family: Family, hf_config: HfConfig) -> None:
    """Tells Megatron which parameters tensor parallelism cuts: it does so itself only while initialising them."""
    parameters = dict(model.named_parameters())
    for name, shard in {parameter_name(rule.megatron): rule.shard for rule in family.weights(hf_config)}.items():
        if name not in parameters:
            continue  # a critic has no output layer
        if shard is not Shard.replicated and not hasattr(parameters[name], "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameters[name], True, shard.value, 1)
