"""Changes how SGLang's scheduler gets from an item's frames to the vision tower's features and uses them."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from relax_core.engines.sglang.media.placed_items import VISION_FOLDER
from relax_core.engines.sglang.server.import_hooks import after_import
from relax_core.families.architecture import VisionTower


def install() -> None:
    """Installs the changes; call it before sglang is imported."""
    after_import("sglang.srt.models.qwen3_vl", _take_frames)
    after_import("sglang.srt.models.qwen3_vl_moe", _count_deepstack)


def forget_features() -> None:
    """Clears SGLang's cache of tower features, whose keys do not contain the weights that computed them."""
    schedule = sys.modules.get("sglang.srt.managers.mm_schedule")
    if schedule is not None and schedule.embedding_cache is not None:
        schedule.embedding_cache.clear()


def _take_frames(module: ModuleType) -> None:
    """Makes patches where the model would put the features of its items together."""
    materialize = module.Qwen3VLForConditionalGeneration._materialize_visual_items

    def of_frames(model: Any, items: Sequence[Any], indices: Iterable[int], *more: Any, **named: Any) -> Any:
        chosen = list(indices)
        made = [_with_patches(items[index], model.visual.device) for index in chosen]
        return materialize(model, made, range(len(made)), *more, **named)

    module.Qwen3VLForConditionalGeneration._materialize_visual_items = of_frames


def _count_deepstack(module: ModuleType) -> None:
    """Lets a mixture of experts add as many further outputs of the tower as its folder says; SGLang assumes three."""
    make = module.Qwen3VLMoeForConditionalGeneration.__init__

    def counted(model: Any, *arguments: Any, **keywords: Any) -> None:
        make(model, *arguments, **keywords)
        model.model.deepstack_embed_to_decoder_layer = range(model.num_deepstack_embeddings)

    module.Qwen3VLMoeForConditionalGeneration.__init__ = counted


def _with_patches(item: Any, device: Any) -> Any:
    """Returns the item with patches in place of its uint8 frames; the item itself keeps its frames for a retraction."""
    import torch

    from relax_core.families.vision.patches import patches_of

    if item.feature.dtype != torch.uint8:
        return item
    made = copy.copy(item)
    made.feature = patches_of(item.feature.cpu().numpy(), _tower(), device=device)
    return made


@cache
def _tower() -> VisionTower:
    from relax_core.families.folder import folder_architecture

    tower = folder_architecture(Path(os.environ[VISION_FOLDER])).vision
    assert tower is not None, "the server is started with this variable only for a model with a tower"
    return tower
