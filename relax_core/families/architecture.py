"""The description of a decoder-only language model that trainer, embedded engine and memory plan share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from relax_core.contracts.family import Experts, Vision
from relax_core.families.rope import Rope

OUTPUT_WEIGHT = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class PatchSettings:
    """Holds how images and videos become the patches and the rows of one model.

    A patch has ``patch_size`` pixels in height and width and ``temporal_patch_size`` frames; ``merge_size`` times
    ``merge_size`` patches become one row. A pixel enters the tower as (value - mean) / std with ``mean`` and ``std`` on
    the scale of 0 to 255, one number for each colour. ``min_pixels`` and ``max_pixels`` bound an image after its
    resize; ``video_min_pixels`` and ``video_max_pixels`` bound all frames of a video together.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    mean: tuple[float, ...] = (127.5, 127.5, 127.5)
    std: tuple[float, ...] = (127.5, 127.5, 127.5)
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    video_min_pixels: int = 4_096
    video_max_pixels: int = 25_165_824

    def alone(self) -> PatchSettings:
        """Returns these settings without what a subclass adds, for a process that does not compute the tower."""
        return PatchSettings(**{one.name: getattr(self, one.name) for one in fields(PatchSettings)})


@dataclass(frozen=True, kw_only=True)
class VisionTower(PatchSettings):
    """Holds one model's vision tower.

    ``config`` is the tower's part of config.json. ``deepstack_layers`` counts the tower's further outputs: output k is
    added after layer k of the language model.
    """

    vision: Vision
    config: Mapping[str, Any]
    deepstack_layers: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tower's weights by their Hugging Face names."""
        return {self.vision.prefix + name: shape for name, shape in self.vision.shapes(self.config).items()}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Holds one model of a family, with its sizes.

    Every layer has RMSNorms, grouped-query attention with rotary embedding, and a gated MLP or experts. ``family`` is
    config.json's model_type. With ``qkv_bias`` the query, key and value projections add a bias; with ``qk_norm`` the
    query and key heads are normed; with ``tie_word_embeddings`` the embedding is the output weight too. ``activation``,
    that of the gate, is a name in torch.nn.functional. ``experts`` is None for a dense model.
    ``prefix`` begins the names of the language model's weights, and ``vision`` is None for a model that reads text
    only. With ``fused_experts`` a layer's experts are two transposed tensors on disk
    (`relax_core.contracts.family.Family`).
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
    prefix: str = "model."
    vision: VisionTower | None = None
    fused_experts: bool = False

    @property
    def ignored_weights(self) -> frozenset[str]:
        """Returns the Hugging Face names of tensors that a folder may contain but that carry no information.

        They are a tied output weight that is stored a second time, and the rotary frequencies that old versions of
        transformers stored.
        """
        frequencies = {f"{self.prefix}layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(self.num_layers)}
        return frozenset(frequencies | ({OUTPUT_WEIGHT} if self.tie_word_embeddings else set()))
