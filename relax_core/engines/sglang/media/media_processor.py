"""Passes encoded media items to SGLang's model, and replaces SGLang's processors of Qwen3-VL, Qwen3.5 and Qwen3-Omni.

SGLang's processors decode, resize and expand media, but Relax's items are already encoded. This processor maps the
item's file, and returns the unchanged ids of the prompt, the uint8 frames of each step of an item, and rotary
positions. SGLang's scheduler process converts the frames to patches (``sglang_patches.py``): only an eighth of the
bytes must be sent between SGLang's processes.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.models.qwen3_5 import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration
from sglang.srt.models.qwen3_omni_moe import Qwen3OmniMoeForConditionalGeneration
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration
from sglang.srt.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

from relax_core.contracts.media import Media
from relax_core.contracts.media_file import FolderReader
from relax_core.contracts.rotary import rotary_of_sequence
from relax_core.engines.sglang.media.placed_items import (
    MEDIA_FOLDER,
    VISION_FOLDER,
    find_items,
    packed_positions,
    sound_spans,
    step_spans,
)
from relax_core.families.folder import folder_architecture
from relax_core.families.towers import Towers


class RelaxMediaProcessor(BaseMultimodalProcessor):
    """Implements SGLang's media processor for the models that Relax trains with images, videos and sounds."""

    models = (
        Qwen3VLForConditionalGeneration,
        Qwen3VLMoeForConditionalGeneration,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeForConditionalGeneration,
        Qwen3OmniMoeForConditionalGeneration,
    )

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        folder = os.environ.get(MEDIA_FOLDER)
        self._reader = FolderReader(Path(folder)) if folder else None
        towers = Towers.of(folder_architecture(Path(os.environ[VISION_FOLDER])))
        assert towers is not None and towers.vision is not None, "the variable is set only for models with a tower"
        self._towers, self._tower = towers, towers.vision

    async def process_mm_data_async(
        self, image_data: Sequence[object], *, input_text: Any, **others: Any
    ) -> MultimodalProcessorOutput:
        """Returns the items that ``image_data`` names. SGLang converts a ValueError to status 400."""
        request = others["request_obj"]
        if not isinstance(input_text, list) or request.video_data or others.get("audio_data"):
            raise ValueError("images, videos and sounds come with input_ids, in image_data as digest:row.")
        found = find_items(image_data or [], input_text, towers=self._towers, reader=self._reader)
        positions, following = rotary_of_sequence(len(input_text), [media for media, _ in found])
        return MultimodalProcessorOutput(
            input_ids=input_text,
            mm_items=[part for media, tensors in found for part in _parts(media, tensors, self._towers)],
            im_start_id=self._tower.vision_start_token_id,
            im_end_id=self._tower.vision_end_token_id,
            im_token_id=self._tower.image_token_id,
            video_token_id=self._tower.video_token_id,
            audio_token_id=None if self._towers.audio is None else self._towers.audio.audio_token_id,
            mrope_positions=torch.from_numpy(packed_positions(positions)),
            mrope_position_delta=torch.from_numpy(packed_positions(np.array([[following - len(input_text)]]))),
        )


def _parts(media: Media, tensors: Mapping[str, np.ndarray], towers: Towers) -> Iterator[MultimodalDataItem]:
    """Yields an SGLang item for each step of a grid (a tower attends only within a step), or for a sound."""
    for step, span in enumerate(step_spans(media, towers)):
        assert towers.vision is not None, "an image or a video needs a model with a vision tower"
        image, size = media.item.kind == "image", towers.vision.temporal_patch_size
        grid = torch.tensor([[1, *media.item.grid[1:]]])
        item = MultimodalDataItem(
            modality=Modality.IMAGE if image else Modality.VIDEO,
            feature=_mapped(tensors["frames"][step * size : (step + 1) * size]),
            offsets=[span],
            model_specific_data={"image_grid_thw" if image else "video_grid_thw": grid},
        )
        yield _named(item, f"{media.item.digest}:{step}")
    if spans := sound_spans(media, towers):
        features = _mapped(tensors["features"])[None]
        mask = torch.ones((1, features.shape[2]), dtype=torch.int64)
        item = MultimodalDataItem(
            modality=Modality.AUDIO,
            feature=features,
            offsets=spans,
            model_specific_data={"feature_attention_mask": mask},
        )
        yield _named(item, f"{media.item.digest}:sound")


def _named(item: MultimodalDataItem, name: str) -> MultimodalDataItem:
    item.set_identity(hashlib.blake2b(name.encode(), digest_size=32).digest())
    return item


def _mapped(values: np.ndarray) -> torch.Tensor:
    """Returns a read-only tensor over the mapped file of an item. All samples of a group share the pages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns about read-only pages
        return torch.from_numpy(values)
