"""Defines the description of a decoder-only language model for trainer, embedded engine and memory plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from relax_core.contracts.family import Audio, DeltaNet, ExpertLayout, Experts, Vision
from relax_core.families.rope import Rope


@dataclass(frozen=True, kw_only=True)
class PatchSettings:
    """Holds the settings that turn images and videos into patches and rows of one model.

    A patch has ``patch_size`` pixels in height and width and ``temporal_patch_size`` frames; ``merge_size`` times
    ``merge_size`` patches become one row. The tower's input for a pixel is (value - mean) / std; ``mean`` and ``std``
    are on the scale of 0 to 255, one number for each colour. ``min_pixels`` and ``max_pixels`` bound the size of a
    resized image. ``video_min_pixels`` and ``video_max_pixels`` bound the total size of a video's frames; if
    ``frame_bounds`` is True, they bound each frame. ``positions_per_second`` is how far the first rotary position
    advances in a second of video; if it is None, a video has time stamps as text.
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
    frame_bounds: bool = False
    positions_per_second: float | None = None

    def alone(self) -> PatchSettings:
        """Returns these settings without the fields of subclasses, for a process that does not compute the tower."""
        return PatchSettings(**{field.name: getattr(self, field.name) for field in fields(PatchSettings)})


@dataclass(frozen=True, kw_only=True)
class VisionTower(PatchSettings):
    """Holds one model's vision tower.

    ``config`` is the tower's part of config.json. ``deepstack_layers`` is the number of the tower's further outputs;
    output k is added after layer k of the language model.
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
class AudioSettings:
    """Holds the settings that turn sounds into features and rows of one model.

    A sound is one channel of ``sampling_rate`` samples a second. A feature frame has ``mel_bins`` values, which are
    computed from ``fft_size`` samples; the next frame begins ``hop_length`` samples later. The tower computes the rows
    of each chunk of ``chunk_frames`` frames separately; the last chunk may be shorter (`rows_of_frames`).
    """

    sampling_rate: int
    mel_bins: int
    fft_size: int
    hop_length: int
    chunk_frames: int
    audio_token_id: int
    audio_start_token_id: int
    audio_end_token_id: int

    def alone(self) -> AudioSettings:
        """Returns these settings without the fields of subclasses, for a process that does not compute the tower."""
        return AudioSettings(**{field.name: getattr(self, field.name) for field in fields(AudioSettings)})

    def rows_of_frames(self, frames: int) -> int:
        """Returns the number of rows for ``frames`` frames: three convolutions halve the frames of each chunk."""
        chunks, rest = divmod(frames, self.chunk_frames)
        return chunks * _halved_thrice(self.chunk_frames) + _halved_thrice(rest)

    def frames_of_seconds(self, seconds: float) -> int:
        """Returns the maximum number of feature frames of a sound of ``seconds`` seconds."""
        return -(-math.ceil(seconds * self.sampling_rate) // self.hop_length)


def _halved_thrice(frames: int) -> int:
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


@dataclass(frozen=True, kw_only=True)
class AudioTower(AudioSettings):
    """Holds one model's audio tower. ``config`` is the tower's part of config.json."""

    audio: Audio
    config: Mapping[str, Any]
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tower's weights by their Hugging Face names."""
        return {self.audio.prefix + name: shape for name, shape in self.audio.shapes(self.config).items()}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Describes one model of a family, with its sizes.

    Every layer has RMSNorms, grouped-query attention with rotary embedding, and a gated MLP or experts. The layers
    ``delta_layers``, counted from 0, have a gated delta net in place of attention. ``family`` is config.json's
    model_type. With ``qkv_bias`` the query, key and value projections add a bias. With ``qk_norm`` the query and key
    heads are normalized. With ``tie_word_embeddings`` the embedding is also the output weight. ``activation`` is the
    gate's activation, a name in torch.nn.functional. ``experts`` is None for a dense model. ``prefix`` is the start of
    the language model's weight names, and ``output_weight`` is the name of the output weight. ``vision`` is None
    without vision input, and ``audio`` is None without audio input. ``expert_layout`` is the layout of the folder.
    `relax_core.contracts.family.Family` explains ``output_gate``, ``zero_centered`` and ``float32``; here ``float32``
    has only the tensors that the folder stores in float32. The model does not use tensors with a name that begins with
    one of ``copied_prefixes``; an export copies them.
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
    output_weight: str = "lm_head.weight"
    vision: VisionTower | None = None
    audio: AudioTower | None = None
    expert_layout: ExpertLayout = ExpertLayout.apart
    delta_net: DeltaNet | None = None
    delta_layers: tuple[int, ...] = ()
    output_gate: bool = False
    zero_centered: bool = False
    float32: tuple[str, ...] = ()
    copied_prefixes: tuple[str, ...] = ()

    @property
    def tower_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the towers' weights by their Hugging Face names."""
        towers = (tower for tower in (self.vision, self.audio) if tower is not None)
        return {name: shape for tower in towers for name, shape in tower.weight_shapes.items()}

    @property
    def rotary_dim(self) -> int:
        """Returns the number of rotated dimensions of each head."""
        return int(self.head_dim * self.rope.part)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Returns the layers with attention, counted from 0."""
        return tuple(layer for layer in range(self.num_layers) if layer not in set(self.delta_layers))

    def is_float32(self, name: str) -> bool:
        """Returns whether a weight is always float32, independent of the model's dtype."""
        return name.endswith(self.float32)

    def is_copied(self, name: str) -> bool:
        """Returns whether a stored tensor is not a weight of the model; an export only copies it."""
        return name.startswith(self.copied_prefixes)

    @property
    def ignored_weights(self) -> frozenset[str]:
        """Returns the Hugging Face names of redundant tensors that a folder may contain.

        These are a second copy of a tied output weight, and the rotary frequencies that old versions of transformers
        stored.
        """
        frequencies = {f"{self.prefix}layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(self.num_layers)}
        return frozenset(frequencies | ({self.output_weight} if self.tie_word_embeddings else set()))
