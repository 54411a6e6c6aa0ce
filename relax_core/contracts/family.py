"""Defines a model family: how the models of one config.json model_type differ from the decoder that Relax computes.

That decoder has RMSNorms, grouped-query attention with rotary embedding, or a gated delta net in some layers, and a
gated MLP or experts. A family is data:
the trainer, the embedded engine, the memory plan and the export all use the same description
(relax_core/families/architecture.py), so a family needs no code in any of them.
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
    """Is the mixture of experts of a model.

    Every layer has ``count`` experts of ``width`` hidden units each, and routes a token to ``per_token`` of them.
    ``normalized`` says whether the weights of the chosen experts are scaled to a sum of 1. Every token uses a further
    expert of ``shared_width`` hidden units, whose output is multiplied by a gate of its own; there is none with 0.
    """

    count: int
    per_token: int
    width: int
    normalized: bool
    shared_width: int = 0


class ExpertLayout(Enum):
    """Says how a folder holds a layer's experts.

    ``apart``: three matrices for each expert. ``fused``: two tensors for all of them, ``experts.gate_up_proj``
    ``[experts, 2 * width, hidden]`` and ``experts.down_proj`` ``[experts, hidden, width]``. ``transposed``: these two
    with their last axes exchanged, as Qwen3-VL-MoE is published.
    """

    apart = "apart"
    fused = "fused"
    transposed = "transposed"


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Is the gated delta net (Yang et al. 2024, arXiv 2412.06464) that some layers have in place of attention.

    There are ``key_heads`` of ``key_dim`` numbers for queries and as many for keys, and ``value_heads`` of
    ``value_dim``; each key head serves equally many value heads. Queries, keys and values pass a causal convolution
    over ``kernel`` rows, channel by channel.
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
class Only:
    """Is a key of config.json of which Relax computes one ``value`` only. ``why`` is the last clause of the refusal."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Is the vision tower of a family: Hugging Face's own modules, which trainer and engine run as they are.

    ``prefix`` begins the Hugging Face names of the tower's weights. ``model`` and ``config`` are the tower's classes as
    "module:class"; the tower is built from the part ``config_key`` of config.json. ``shapes`` returns the shapes of its
    weights from that part, by their names behind ``prefix``. ``projector`` lists how the names of those weights begin
    that belong to the projector, which maps patches to the language model.

    ``seconds_key`` names the key of config.json that says how far a second of a video moves the first rotary position
    (Qwen3-Omni); without it a video's rows have time stamps as text (Qwen3-VL). With ``frame_bounds`` the processor's
    bounds of pixels hold for each frame of a video, and without for all frames together. ``video_pixels`` are these
    bounds for folders that are published without video_preprocessor_config.json.
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
    """Is the tower of a family that hears: Hugging Face's own modules, which trainer and engine run as they are.

    The fields mean what they mean in `Vision`. The tower hears clips, and with ``modality.audio_in_video`` the sound
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
    """Is the record of one model family.

    ``name`` is config.json's model_type, and ``summary`` says in one line which models have it. With ``qkv_bias`` the
    query, key and value projections have a bias; with ``qk_norm`` the query and key heads are normalised.
    ``tied_by_default`` says whether the embedding is also the output weight if config.json has no tie_word_embeddings.
    The family accepts the values in ``only`` besides those that all families share (relax_core/families/table.py).
    ``experts`` reads the mixture of experts of a family that has one. ``check`` raises ValueError for a combination
    that no single key shows.

    ``text_key`` names the part of config.json that describes the language model, if it is not the whole, and ``prefix``
    begins the names of its weights; ``output_weight`` is the name of the output weight. Where config.json describes
    several models, the part is that of its inner config (`relax_core.families.hf_config.inner_config`). ``vision`` is
    the tower of a family that sees, and ``audio`` that of one that hears. ``expert_layouts`` are the forms in which
    folders hold the experts; if there are several, a folder's own tensors tell which it is.

    ``delta_net`` reads the gated delta net of a family whose config.json lists the kind of each layer in layer_types.
    With ``output_gate`` the query projection also computes a gate for the attention's output, with ``zero_centered``
    a norm multiplies by 1 + its weight. ``rotary_part`` is the part of each head that is rotated unless config.json
    names another; if it is None, whole heads are rotated and no part is accepted.
    ``float32`` lists how the names of those weights end that stay float32 in a model of another dtype if their folder
    has them so.

    ``option`` is the option of `model` for such folders, if it is not named like the family.

    ``passed`` lists how the names of those tensors begin that a folder has beside the model and that Relax does not
    compute; every export copies them from the source folder.
    """

    name: str
    summary: str = ""
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_by_default: bool = False
    only: tuple[Only, ...] = ()
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
    passed: tuple[str, ...] = ()
    option: str | None = None

    @property
    def model_option(self) -> str:
        """Returns the option of `model` for folders of this family."""
        return self.option or self.name

    @property
    def media_kinds(self) -> tuple[MediaKind, ...]:
        """Returns the kinds of media that the family's models take."""
        return tuple(kind for tower in (self.vision, self.audio) if tower is not None for kind in tower.kinds)


def checked_family(family: Family) -> Family:
    """Returns the family with functions whose results are checked.

    Raises ValueError for a field of another type.
    """
    if not family.name or not all(isinstance(one, str) for one in (family.name, family.summary)):
        raise ValueError(f"SPEC.name={family.name!r}: a family's name is config.json's model_type.")
    if not isinstance(family.only, tuple) or not all(isinstance(one, Only) for one in family.only):
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
