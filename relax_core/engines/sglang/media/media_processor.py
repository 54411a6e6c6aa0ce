"""Hands encoded items over to SGLang's model, in place of SGLang's own processor of Qwen3-VL.

SGLang's processor would decode, resize and expand what is encoded already. This one maps the item's file and gives the
prompt's own ids, the uint8 frames of each step of an item, and rotary positions. The scheduler makes patches of the
frames (``model_changes.py``), so that an eighth of the bytes passes between SGLang's processes.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration
from sglang.srt.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

from relax_core.contracts.media import Media
from relax_core.contracts.media_file import FolderReader
from relax_core.contracts.trees.rotary import rotary_of_sequence
from relax_core.engines.sglang.media.placed_items import MEDIA_FOLDER, VISION_FOLDER, find_items, step_spans
from relax_core.families.architecture import VisionTower
from relax_core.families.folder import folder_architecture


class RelaxMediaProcessor(BaseMultimodalProcessor):
    """Is SGLang's processor for the models that Relax trains with images and videos."""

    models = (Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration)

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        folder = os.environ.get(MEDIA_FOLDER)
        self._reader = FolderReader(Path(folder)) if folder else None
        tower = folder_architecture(Path(os.environ[VISION_FOLDER])).vision
        assert tower is not None, "the server is started with this variable only for a model with a tower"
        self._tower = tower

    async def process_mm_data_async(
        self, image_data: Sequence[object], *, input_text: Any, **others: Any
    ) -> MultimodalProcessorOutput:
        """Returns the items that ``image_data`` names. Raises ValueError, which SGLang answers with status 400."""
        request = others["request_obj"]
        if not isinstance(input_text, list) or request.video_data or others.get("audio_data"):
            raise ValueError("images and videos come with input_ids, in image_data as digest:row.")
        found = find_items(image_data or [], input_text, tower=self._tower, reader=self._reader)
        positions, following = rotary_of_sequence(len(input_text), [media for media, _ in found])
        return MultimodalProcessorOutput(
            input_ids=input_text,
            mm_items=[step for media, frames in found for step in _steps(media, frames, self._tower)],
            im_start_id=self._tower.vision_start_token_id,
            im_end_id=self._tower.vision_end_token_id,
            im_token_id=self._tower.image_token_id,
            video_token_id=self._tower.video_token_id,
            mrope_positions=torch.from_numpy(positions),
            mrope_position_delta=torch.tensor([[int(following) - len(input_text)]]),
        )


def _steps(media: Media, frames: np.ndarray, tower: VisionTower) -> Iterator[MultimodalDataItem]:
    """Yields one of SGLang's items for each step of the grid; the tower lets no step see another one."""
    is_image = media.item.kind == "image"
    grid = torch.tensor([[1, *media.item.grid[1:]]])
    spans = step_spans(media.item.ids, tower, start=media.start)
    for step, span in enumerate(spans):
        first = step * tower.temporal_patch_size
        one = MultimodalDataItem(
            modality=Modality.IMAGE if is_image else Modality.VIDEO,
            feature=_mapped(frames[first : first + tower.temporal_patch_size]),
            offsets=[span],
            model_specific_data={"image_grid_thw" if is_image else "video_grid_thw": grid},
        )
        one.set_identity(hashlib.blake2b(f"{media.item.digest}:{step}".encode(), digest_size=32).digest())
        yield one


def _mapped(frames: np.ndarray) -> torch.Tensor:
    """Returns a tensor over the pages of the item's file, which the samples of a group share; nothing writes to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the pages are read-only
        return torch.from_numpy(frames)
