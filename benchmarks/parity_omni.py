"""Makes model and groups of `benchmarks.parity --media` for Qwen3-Omni. Also computes Hugging Face's logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.parity_media import (
    AUDIO,
    AUDIO_BEGIN,
    AUDIO_END,
    BEGIN,
    END,
    EXPERT_COUNT,
    IMAGE,
    LAYERS,
    PER_TOKEN,
    SIZES,
    VIDEO,
    group,
)
from relax_core.contracts.media import MediaItem
from relax_core.contracts.media_file import FolderReader
from relax_core.contracts.tree import TokenTree
from relax_core.families.audio_tower import clip_rows, video_with_sound_rows
from relax_core.families.folder import folder_architecture
from relax_core.families.tiny_configs import tiny_omni_config, tiny_omni_files
from relax_core.families.tower_passes import patches_of
from relax_core.families.towers import Towers
from relax_core.families.vision_tower import ItemRows, image_rows, timed_video_rows
from relax_core.tools.tiny_media import build_omni_model, published_omni, write_published_omni, write_settings
from tests.media_items import item_of_rows

OMNI = "qwen3_omni_moe"
OMNI_CASES = ("image", "video", "video with its sound", "clips", "four kinds", "text", "mixed")
CLIPS = (10, 100, 730, 3000)  # frames of clips of 0.1, 1, 7.3 and 30 seconds
SECONDS = 0.7  # time between two temporal patches of a video: 9.1 positions


def make_omni_model(folder: Path, *, seed: int = 0, size: float = 0.1, **text: Any) -> Any:
    """Returns transformers' thinker of a tiny random model of eight layers. The model's folder also has the talker.

    ``size`` is the scale of the random weights; ``text`` replaces keys of the language model's configuration.
    """
    config = tiny_omni_config()
    thinker = config["thinker_config"]
    thinker |= {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO}
    thinker |= {"vision_start_token_id": BEGIN, "vision_end_token_id": END}
    thinker |= {"audio_start_token_id": AUDIO_BEGIN, "audio_end_token_id": AUDIO_END}
    thinker["text_config"] |= {"vocab_size": 60, "num_hidden_layers": LAYERS, "rope_theta": 1e6}
    thinker["text_config"]["pad_token_id"] = None  # transformers leaves out a padding id's gradient
    thinker["text_config"] |= {"num_experts": EXPERT_COUNT, "num_experts_per_tok": PER_TOKEN, **text}
    width = thinker["text_config"]["hidden_size"]
    thinker["vision_config"]["out_hidden_size"] = thinker["audio_config"]["output_dim"] = width
    torch.manual_seed(seed)
    model = build_omni_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * size
            parameter.copy_(parameter + noise if "norm" in name or "ln_" in name else noise)
    folder.mkdir(exist_ok=True)
    write_settings(folder, config, tiny_omni_files())
    write_published_omni(model, folder)
    return model.thinker


class OmniItems:
    """Makes random images, videos and clips and writes their files into ``folder``."""

    def __init__(self, model_folder: Path, folder: Path) -> None:
        architecture = folder_architecture(model_folder)
        assert architecture.vision is not None and architecture.audio is not None
        self._vision, self._audio, self._folder = architecture.vision, architecture.audio, folder
        self._random = np.random.default_rng(5)
        folder.mkdir(exist_ok=True)

    def image(self, height: int, width: int) -> MediaItem:
        return self._item(
            "image", image_rows(self._vision, grid=[1, height, width]), frames=self._pixels(1, height, width)
        )

    def video(self, time: int, height: int, width: int, *, seconds: float = SECONDS) -> MediaItem:
        rows = timed_video_rows(self._vision, grid=[time, height, width], seconds=seconds)
        return self._item("video", rows, seconds=seconds, frames=self._pixels(2 * time, height, width))

    def clip(self, frames: int) -> MediaItem:
        return self._item("audio", clip_rows(self._audio, frames=frames), features=self._features(frames))

    def video_with_sound(self, time: int, height: int, width: int, *, frames: int) -> MediaItem:
        grid = [time, height, width]
        rows = video_with_sound_rows(self._vision, self._audio, grid=grid, seconds=SECONDS, frames=frames)
        pixels = self._pixels(2 * time, height, width)
        return self._item("video", rows, frames=pixels, features=self._features(frames))

    def _item(self, kind: Any, rows: ItemRows, *, seconds: float = SECONDS, **tensors: np.ndarray) -> MediaItem:
        return item_of_rows(self._vision, kind, rows, tensors, seconds=seconds, folder=self._folder)

    def _pixels(self, frames: int, height: int, width: int) -> np.ndarray:
        size = self._vision.patch_size
        return self._random.integers(0, 256, (frames, height * size, width * size, 3), dtype=np.uint8)

    def _features(self, frames: int) -> np.ndarray:
        return self._random.standard_normal((self._audio.mel_bins, frames)).astype(np.float32)


def make_omni_case(case: str, items: OmniItems) -> list[TokenTree]:
    """Returns the groups of a case. In the case "mixed" the last group has text only."""
    many = [items.image(*size) for size in SIZES]
    video, clips = items.video(3, 4, 4), [items.clip(frames) for frames in CLIPS]
    heard = items.video_with_sound(3, 2, 4, frames=250)
    groups = {
        "image": [group("i", [3, many[1], 2], [[4], [1], [6]])],
        "video": [group("v", [4, video, 3], [[4], [6]])],
        "video with its sound": [group("h", [2, heard, 3], [[4], [1], [5]])],
        "clips": [
            group("c", [2, clips[2], 1, clips[0], 3], [[3], [5]]),
            group("d", [1, clips[3], 2, clips[1], 2], [[2], [6]]),
        ],
        "four kinds": [group("f", [2, many[0], 1, clips[2], 3, video, 2], [[3, clips[0], 4], [5], [1, many[2], 2]])],
        "text": [group("t", [5], [[4], [2], [6]]), group("u", [9], [[3], [5]])],
    }
    groups["mixed"] = [tree for name in ("image", "four kinds", "clips", "video", "text") for tree in groups[name]]
    return [dataclasses.replace(tree, group_uid=f"g{place}") for place, tree in enumerate(groups[case])]


def omni_logits(model: Any, tree: TokenTree, reader: FolderReader, towers: Towers) -> Tensor:
    """Returns transformers' logits of a tree without forks, ``[rows, vocabulary]``."""
    assert towers.vision is not None
    ids = torch.from_numpy(tree.token_ids).long()[None]
    inputs: dict[str, Any] = {}
    items = [(medium.item, reader.tensors(medium.item)) for medium in tree.media]
    names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
    for kind, (pixels, grids) in names.items():
        own = [(item, tensors) for item, tensors in items if item.kind == kind]
        if own:
            inputs[pixels] = torch.cat([patches_of(tensors["frames"], towers.vision) for _, tensors in own])
            inputs[grids] = torch.tensor([item.grid for item, _ in own])
        if own and kind == "video":
            inputs["video_second_per_grid"] = torch.tensor([item.seconds for item, _ in own])
            inputs["use_audio_in_video"] = any(item.audio_frames for item, _ in own)
    features = [torch.from_numpy(tensors["features"].copy()) for _, tensors in items if "features" in tensors]
    if features:
        # The batch needs at least one complete chunk, because transformers pads chunks to the longest chunk.
        longest = max(100, *(feature.shape[1] for feature in features))
        inputs["input_features"] = torch.stack(
            [torch.nn.functional.pad(feature, (0, longest - feature.shape[1])) for feature in features]
        )
        inputs["feature_attention_mask"] = torch.tensor(
            [[int(at < feature.shape[1]) for at in range(longest)] for feature in features]
        )
    model.rope_deltas = None
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0]
    assert isinstance(logits, Tensor)
    return logits


def published_thinker(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a thinker's tensors in the format of its folder."""
    return {f"thinker.{name}": tensor.contiguous() for name, tensor in published_omni(tensors.items())}
