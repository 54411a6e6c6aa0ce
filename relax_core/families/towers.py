"""Finds the rows of a media item that get tower features, and computes the towers' work for an item.

The work of a prompt is the number of its rows plus the towers' work for its items, in rows of the language model. An
item's work in rows is the number of multiplications in the towers' forward pass of the item, divided by the number of
multiplications in the language model's forward pass of one row. The ratio is the same in a backward pass, because
language model and towers both have twice as many multiplications there. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_core.contracts.family import HfConfig
from relax_core.contracts.media import MediaItem
from relax_core.families.architecture import Architecture, AudioTower, VisionTower
from relax_core.families.audio_tower import audible_feature_rows
from relax_core.families.vision_tower import feature_rows

_KERNEL = 9  # an audio tower's convolution reads 3 x 3 values


def item_work(architecture: Architecture, item: MediaItem) -> float:
    """Returns the work of the towers for an image, a video, a sound, or a video with its sound, in rows.

    The language model's work for the feature rows is not included.
    """
    products = 0
    if architecture.vision is not None:
        products += vision_products(architecture.vision.config, item.grid)
    if architecture.audio is not None:
        products += audio_products(architecture.audio.config, item.audio_frames)
    return products / row_products(architecture)


def vision_products(config: HfConfig, grid: Sequence[int]) -> int:
    """Returns the multiplications of a vision tower for an item with ``grid`` (time, height, width) in patches.

    ``config`` is the tower's part of config.json. The patches of one time step attend to each other. Each merger maps
    the patches of a row to one vector.
    """
    time, height, width = grid
    frame, hidden, merge = height * width, config["hidden_size"], config["spatial_merge_size"] ** 2
    embedding = config["in_channels"] * config["temporal_patch_size"] * config["patch_size"] ** 2 * hidden
    block = 4 * hidden**2 + 2 * hidden * config["intermediate_size"] + 2 * frame * hidden
    mergers = 1 + len(config.get("deepstack_visual_indexes") or ())
    merger = hidden * merge * (hidden * merge + config["out_hidden_size"])
    return int(time * frame * (embedding + config["depth"] * block) + time * frame // merge * mergers * merger)


def audio_products(config: HfConfig, frames: int) -> int:
    """Returns the multiplications of an audio tower for a sound of ``frames`` frames of features.

    ``config`` is the tower's part of config.json. Three convolutions halve the bins and frames of each chunk; the last
    chunk is padded to full length. The rows of one window attend to each other.
    """
    hidden, channels, bins = config["d_model"], config["downsample_hidden_size"], config["num_mel_bins"]
    length = chunk = 2 * config.get("n_window", 50)
    of_chunk, inputs = 0, 1
    for _ in range(3):
        bins, length = (bins + 1) // 2, (length + 1) // 2
        of_chunk += bins * length * channels * inputs * _KERNEL
        inputs = channels
    of_chunk += length * channels * bins * hidden
    rest = frames % chunk
    rows = frames // chunk * length + (rest + 7) // 8  # 8 frames of a chunk become a row
    layer = 4 * hidden**2 + 2 * hidden * config["encoder_ffn_dim"]
    of_row = config["encoder_layers"] * layer + hidden * (hidden + config["output_dim"])
    window = config.get("n_window_infer", 800) // chunk * length
    windows, short = divmod(rows, window)
    scores = config["encoder_layers"] * 2 * hidden * (windows * window**2 + short**2)
    return int(-(-frames // chunk) * of_chunk + rows * of_row + scores)


def row_products(architecture: Architecture) -> int:
    """Returns the multiplications of one row in the layers of the language model.

    The count includes only the experts that a row is routed to. It excludes attention scores, which depend on previous
    rows, and the output layer, which prompt rows do not need.
    """
    arch, experts, net = architecture, architecture.experts, architecture.delta_net
    heads = arch.num_heads * (3 if arch.output_gate else 2) + 2 * arch.num_kv_heads
    products = len(arch.attention_layers) * arch.hidden_size * arch.head_dim * heads
    if net is not None:
        inputs = net.channels + net.values + 2 * net.value_heads
        state = 3 * net.value_heads * net.key_dim * net.value_dim  # read the state, write it, compute the output
        mixing = arch.hidden_size * (inputs + net.values) + net.kernel * net.channels + state
        products += len(arch.delta_layers) * mixing
    width = arch.intermediate_size
    if experts is not None:
        width = experts.per_token * experts.width + experts.shared_width
        products += arch.num_layers * arch.hidden_size * (experts.count + bool(experts.shared_width))
    return products + arch.num_layers * 3 * arch.hidden_size * width


@dataclass(frozen=True, slots=True, kw_only=True)
class Towers:
    """Holds the vision tower and the audio tower of a multimodal model; one of them may be None."""

    vision: VisionTower | None = None
    audio: AudioTower | None = None

    @staticmethod
    def of(architecture: Architecture) -> Towers | None:
        """Returns the towers of a model, or None for a text-only model."""
        if architecture.vision is None and architecture.audio is None:
            return None
        return Towers(vision=architecture.vision, audio=architecture.audio)

    def audio_rows(self, token_ids: np.ndarray) -> np.ndarray:
        """Returns which rows get a feature of the audio tower, bool ``[rows]``."""
        if self.audio is None:
            return np.zeros(len(token_ids), dtype=bool)
        return audible_feature_rows(self.audio, token_ids)

    def feature_rows(self, token_ids: np.ndarray) -> np.ndarray:
        """Returns which rows get a feature of a tower, bool ``[rows]``; time stamps are text."""
        found = self.audio_rows(token_ids)
        return found if self.vision is None else found | feature_rows(self.vision, token_ids)

    def features(self, item: MediaItem) -> int:
        """Returns the number of features that the towers compute for an item."""
        seen = 0 if self.vision is None else item.patches // self.vision.merge_size**2
        return seen + (0 if self.audio is None else self.audio.rows_of_frames(item.audio_frames))

    def order(self, items: Sequence[MediaItem]) -> np.ndarray | None:
        """Returns the index of each feature in the towers' output: all vision features, then all audio features.

        The result is int64 ``[features]``, item by item in the order of the items' rows. It is None without audio,
        because the output then already has this order.
        """
        if not any(item.audio_frames for item in items):
            return None
        rows = [self.audio_rows(item.ids)[self.feature_rows(item.ids)] for item in items]
        heard = np.concatenate(rows)
        return np.where(heard, np.count_nonzero(~heard) + np.cumsum(heard), np.cumsum(~heard)) - 1
