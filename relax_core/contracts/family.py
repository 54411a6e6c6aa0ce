"""The contract of a model family, which describes how models of one config.json model_type differ from Relax's decoder.

The decoder has RMSNorms, grouped-query attention with rotary embedding, or a gated delta net in some layers, and a
gated MLP or experts. A family is only a description. The trainer, the embedded engine, the memory plan and the export
all use this description (relax_core/families/architecture.py), so they contain no code for single families.
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

    Every layer has ``count`` experts of ``width`` hidden units each, and routes each token to ``per_token`` experts.
    ``normalized`` says whether the weights of the chosen experts are scaled to a sum of 1. Every token also passes a
    shared expert of ``shared_width`` hidden units; the output of the shared expert is multiplied by a separate gate. A
    ``shared_width`` of 0 means no shared expert.
    """

    count: int
    per_token: int
    width: int
    normalized: bool
    shared_width: int = 0


class ExpertLayout(Enum):
    """Names the formats that a folder may use to store a layer's experts.

    ``apart``: three matrices for each expert. ``fused``: two tensors for all experts, ``experts.gate_up_proj``
    ``[experts, 2 * width, hidden]`` and ``experts.down_proj`` ``[experts, hidden, width]``. ``transposed``: the two
    tensors of ``fused`` with their last two axes swapped, as in the published Qwen3-VL-MoE.
    """

    apart = "apart"
    fused = "fused"
    transposed = "transposed"


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Describes the gated delta net (Yang et al. 2024, arXiv 2412.06464) that some layers have instead of attention.

    Queries and keys have ``key_heads`` heads of width ``key_dim`` each. Values have ``value_heads`` heads of width
    ``value_dim``; each key head belongs to the same number of value heads. Queries, keys and values pass a causal
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
        """Returns the total width of queries, keys and values, the input of the convolution."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class RequiredValue:
    """Holds a key of config.json with its only supported ``value``; ``why`` is the last clause of the error."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Describes the vision tower of a family; trainer and engine use Hugging Face's modules for it without changes.

    ``prefix`` is the prefix of the tower's weights in Hugging Face names. ``model`` and ``config`` are the tower's
    classes as "module:class"; the tower is built from the section ``config_key`` of config.json. ``shapes`` computes
    from that section the shapes of the tower's weights, by weight names without ``prefix``. ``projector`` lists the
    name prefixes of the projector's weights; the projector maps patches to the language model.

    ``seconds_key`` is the key of config.json for the number of temporal rotary positions per second of a video
    (Qwen3-Omni); without this key a video's rows contain time stamps as text (Qwen3-VL). With ``frame_bounds`` the
    processor's pixel bounds apply to each frame of a video, otherwise to all frames together. ``video_pixels`` are the
    pixel bounds for folders without video_preprocessor_config.json.
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
    """Describes the audio tower of a family; trainer and engine use Hugging Face's modules for it without changes.

    The fields have the same meaning as in `Vision`. The tower's inputs are audio clips and, with
    ``modality.audio_in_video``, the sound tracks of videos.
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

    ``name`` is config.json's model_type, and ``summary`` lists the family's models in one line. With ``qkv_bias`` the
    query, key and value projections have a bias; with ``qk_norm`` the query and key heads are normalised.
    ``tied_by_default`` applies if config.json has no tie_word_embeddings, and says whether the embedding is also the
    output weight. ``only`` lists required values of config.json keys, in addition to the values that every family
    requires (relax_core/families/builtin_families.py). ``experts`` reads the mixture of experts from config.json; a
    family without experts has no such function. ``check`` raises ValueError for invalid combinations of keys.

    ``text_key`` is the section of config.json that describes the language model; None means the whole file. ``prefix``
    is the name prefix of the language model's weights, and ``output_weight`` the name of its output weight. If
    config.json describes several models, the section is in its inner config
    (`relax_core.families.hf_config.inner_config`). ``vision`` and ``audio`` are the towers of a multimodal family.
    ``expert_layouts`` lists the formats that folders use for the experts. If there are several, the tensors of a folder
    determine its format.

    ``delta_net`` reads the gated delta net from config.json, which lists the kind of each layer in layer_types. With
    ``output_gate`` the query projection also computes a gate for the attention's output; with ``zero_centered`` a norm
    multiplies by 1 + its weight. ``rotary_part`` is the default fraction of each head that is rotated. If it is None,
    whole heads are rotated, and config.json must not set another fraction. ``float32`` lists name suffixes of weights.
    A weight with such a name that is float32 in the folder stays float32 in a model of another dtype.

    ``option`` is the option of `model` for folders of this family; None if the option has the family's name.

    ``copied_prefixes`` lists name prefixes of additional tensors that Relax does not use. Every export copies these
    tensors from the source folder.
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
    """Returns the family with functions that check their results.

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
