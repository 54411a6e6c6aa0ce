"""Changes how SGLang's scheduler gets from an item's frames or sound to the towers' features and uses them."""

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
from relax_core.families.architecture import Architecture


def install() -> None:
    """Installs the changes; call it before sglang is imported."""
    after_import("sglang.srt.models.qwen3_vl", _take_frames)
    after_import("sglang.srt.models.qwen3_vl_moe", _count_deepstack)
    after_import("sglang.srt.models.qwen3_omni_moe", _pass_whole_chunks)


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


def _pass_whole_chunks(module: ModuleType) -> None:
    """Gives each sound its features of the trainer: the tower pads its chunks to the longest one of a batch.

    So each sound passes beside a silent one of one whole chunk, whose rows are thrown away.
    """
    import torch

    def of_sounds(model: Any, items: Sequence[Any]) -> Any:
        tower, settings = model.audio_tower, _model().audio
        assert settings is not None, "the model hears"
        like, chunk = next(tower.parameters()), settings.chunk_frames
        rows = []
        for item in items:
            sound = item.feature[0].to(device=like.device, dtype=like.dtype)
            both = torch.cat([sound, sound.new_zeros(len(sound), chunk)], dim=1)
            lengths = torch.tensor([sound.shape[1], chunk], device=like.device)
            own = settings.rows_of_frames(sound.shape[1])
            found = tower(both, feature_lens=lengths).last_hidden_state
            rows.append(found.reshape(-1, found.shape[-1])[:own])
        return torch.cat(rows)

    module.Qwen3OmniMoeThinkerForConditionalGeneration.get_audio_feature = of_sounds


def _with_patches(item: Any, device: Any) -> Any:
    """Returns the item with patches in place of its uint8 frames; the item itself keeps its frames for a retraction."""
    import torch

    from relax_core.families.tower_passes import patches_of

    if item.feature.dtype != torch.uint8:
        return item
    tower = _model().vision
    assert tower is not None, "the server is started with this variable only for a model with a tower"
    made = copy.copy(item)
    made.feature = patches_of(item.feature.cpu().numpy(), tower, device=device)
    return made


@cache
def _model() -> Architecture:
    from relax_core.families.folder import folder_architecture

    return folder_architecture(Path(os.environ[VISION_FOLDER]))
