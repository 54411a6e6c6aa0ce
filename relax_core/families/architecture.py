"""The description of a decoder-only language model that trainer, embedded engine and memory plan share."""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.contracts.family import Experts
from relax_core.families.rope import Rope

OUTPUT_WEIGHT = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Holds one model of a family, with its sizes.

    Every layer has RMSNorms, grouped-query attention with rotary embedding, and a gated MLP or experts. ``family`` is
    config.json's model_type. With ``qkv_bias`` the query, key and value projections add a bias; with ``qk_norm`` the
    query and key heads are normed; with ``tie_word_embeddings`` the embedding is the output weight too. ``activation``,
    that of the gate, is a name in torch.nn.functional. ``experts`` is None for a dense model.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    max_positions: int
    qkv_bias: bool
    qk_norm: bool
    activation: str = "silu"
    experts: Experts | None = None

    @property
    def ignored_weights(self) -> frozenset[str]:
        """Returns the Hugging Face names of tensors that a folder may contain but that carry no information.

        They are a tied output weight that is stored a second time, and the rotary frequencies that old versions of
        transformers stored.
        """
        frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(self.num_layers)}
        return frozenset(frequencies | ({OUTPUT_WEIGHT} if self.tie_word_embeddings else set()))
