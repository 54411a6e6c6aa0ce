"""The contract of a model family: how models of one config.json model_type differ from Relax's decoder.

The decoder has RMSNorms, grouped-query attention with rotary embedding, or a gated delta net in some layers, and a
gated MLP or experts. A family is data: the trainer, the embedded engine, the memory plan and the export use the same
description (relax_core/families/architecture.py), so a family needs no code in them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from relax_core.contracts.media import MediaKind

HfConfig = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Describes the mixture of experts of a model.

    Every layer has ``count`` experts of ``width`` hidden units each, and routes a token to ``per_token`` of them.
    ``normalized`` says whether the weights of the chosen experts are scaled to a sum of 1. Every token also uses a
    shared expert of ``shared_width`` hidden units, whose output is multiplied by its own gate; 0 means no shared
    expert.
    """

    count: int
    per_token: int
    width: int
    normalized: bool
    shared_width: int = 0


class ExpertLayout(Enum):
    """Names the formats in which a folder stores a layer's experts.

    ``apart``: three matrices for each expert. ``fused``: two tensors for all experts, ``experts.gate_up_proj``
    ``[experts, 2 * width, hidden]`` and ``experts.down_proj`` ``[experts, hidden, width]``. ``transposed``: the same
    two tensors with their last two axes swapped, as in the published Qwen3-VL-MoE.
    """

    apart = "apart"
    fused = "fused"
    transposed = "transposed"


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Describes the gated delta net (Yang et al. 2024, arXiv 2412.06464) that some layers have instead of attention.

    There are ``key_heads`` heads of width ``key_dim`` for queries and as many for keys, and ``value_heads`` heads of
    width ``value_dim``; each key head serves equally many value heads. Queries, keys and values pass a causal
    depthwise convolution over ``kernel`` rows.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Returns the width of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Returns the width of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Returns the width of queries, keys and values together, which the convolution reads."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class RequiredValue:
    """Holds a key of config.json and its only supported ``value``. ``why`` is the last clause of the error."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Describes the vision tower of a family, which uses Hugging Face's modules unchanged in trainer and engine.

    ``prefix`` is the prefix of the tower's weights in Hugging Face names. ``model`` and ``config`` are the tower's
    classes as "module:class"; the tower is built from the section ``config_key`` of config.json. ``shapes`` returns the
    shapes of its weights from that section, by their names after ``prefix``. ``projector`` lists the name prefixes of
    the projector's weights; the projector maps patches to the language model.

    ``seconds_key`` is the key of config.json for the number of temporal rotary positions per second of a video
    (Qwen3-Omni); without it a video's rows contain time stamps as text (Qwen3-VL). With ``frame_bounds`` the
    processor's pixel bounds apply to each frame of a video, otherwise to all frames together. ``video_pixels`` are
    these bounds for folders that are published without video_preprocessor_config.json.
    """

    prefix: str
    model: str
    config: str
    shapes: Callable[[HfConfig], Mapping[str, tuple[int, ...]]]
    config_key: str = "vision_config"
    projector: tuple[str, ...] = ()
    kinds: tuple[MediaKind, ...] = ("image", "video")
    seconds_key: str | None = None
    frame_bounds: bool = False
    video_pixels: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Audio:
    """Describes the audio tower of a family, which uses Hugging Face's modules unchanged in trainer and engine.

    The fields are those of `Vision`. The tower's inputs are audio clips, and with ``modality.audio_in_video`` the sound
    tracks of videos.
    """

    prefix: str
    model: str
    config: str
    shapes: Callable[[HfConfig], Mapping[str, tuple[int, ...]]]
    config_key: str = "audio_config"
    projector: tuple[str, ...] = ()
    kinds: tuple[MediaKind, ...] = ("audio",)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describes one model family.

    ``name`` is config.json's model_type, and ``summary`` lists its models in one line. With ``qkv_bias`` the query, key
    and value projections have a bias; with ``qk_norm`` the query and key heads are normalised. ``tied_by_default`` says
    whether the embedding is also the output weight if config.json has no tie_word_embeddings. ``only`` lists required
    values of config.json keys, in addition to those of all families (relax_core/families/builtin_families.py).
    ``experts`` reads the mixture of experts of a family that has one. ``check`` raises ValueError for invalid
    combinations of keys.

    ``text_key`` is the section of config.json that describes the language model, None for the whole file, and
    ``prefix`` is the name prefix of its weights; ``output_weight`` is the name of the output weight. If config.json
    describes several models, the section is in its inner config (`relax_core.families.hf_config.inner_config`).
    ``vision`` and ``audio`` are the towers of a multimodal family. ``expert_layouts`` are the formats in which folders
    store the experts; if there are several, a folder's tensors determine its format.

    ``delta_net`` reads the gated delta net of a family whose config.json lists the kind of each layer in layer_types.
    With ``output_gate`` the query projection also computes a gate for the attention's output; with ``zero_centered``
    a norm multiplies by 1 + its weight. ``rotary_part`` is the default fraction of each head that is rotated; if it is
    None, whole heads are rotated and config.json may not set another fraction.
    ``float32`` lists the name suffixes of weights that stay float32 in a model of another dtype, if they are float32 in
    the folder.

    ``option`` is the option of `model` for folders of this family, if it is not named like the family.

    ``copied_prefixes`` lists the name prefixes of a folder's additional tensors that Relax does not compute with;
    every export copies them from the source folder.
    """

    name: str
    summary: str = ""
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_by_default: bool = False
    only: tuple[RequiredValue, ...] = ()
    experts: Callable[[HfConfig], Experts] | None = None
    check: Callable[[HfConfig], None] | None = None
    text_key: str | None = None
    prefix: str = "model."
    output_weight: str = "lm_head.weight"
    vision: Vision | None = None
    audio: Audio | None = None
    expert_layouts: tuple[ExpertLayout, ...] = (ExpertLayout.apart,)
    delta_net: Callable[[HfConfig], DeltaNet] | None = None
    output_gate: bool = False
    zero_centered: bool = False
    rotary_part: float | None = None
    float32: tuple[str, ...] = ()
    copied_prefixes: tuple[str, ...] = ()
    option: str | None = None

    @property
    def model_option(self) -> str:
        """Returns the option of `model` for folders of this family."""
        return self.option or self.name

    @property
    def media_kinds(self) -> tuple[MediaKind, ...]:
        """Returns the kinds of media that the family's models accept."""
        return tuple(kind for tower in (self.vision, self.audio) if tower is not None for kind in tower.kinds)


def checked_family(family: Family) -> Family:
    """Returns the family with checks of its functions' results.

    Raises ValueError for a field of a wrong type.
    """
    if not family.name or not all(isinstance(text, str) for text in (family.name, family.summary)):
        raise ValueError(f"SPEC.name={family.name!r}: a family's name is config.json's model_type.")
    if not isinstance(family.only, tuple) or not all(isinstance(only, RequiredValue) for only in family.only):
        raise ValueError(f"SPEC.only={family.only!r}: give a tuple of Only(key, value, why).")
    for name in ("qkv_bias", "qk_norm", "tied_by_default"):
        if not isinstance(value := getattr(family, name), bool):
            raise ValueError(f"SPEC.{name}={value!r}: give True or False.")
    read = family.experts
    if read is None:
        return family

    def experts(config: HfConfig) -> Experts:
        found = read(config)
        if not isinstance(found, Experts):
            raise ValueError(f"family {family.name}: experts(config) returned {found!r}. Return Experts(...).")
        return found

    return dataclasses.replace(family, experts=experts)
