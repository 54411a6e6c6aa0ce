"""The work of an item in rows, against the products that torch counts in transformers' own modules."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from relax_core.contracts.media import MediaItem
from relax_core.families.architecture import Architecture
from relax_core.families.audio.audio_tower import pass_sounds
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import inner_config
from relax_core.families.media_work import audio_products, item_work, row_products, vision_products
from relax_core.families.tiny_configs import HYBRID, HYBRID_EXPERTS, VISION, VISION_EXPERTS, processor_files, tiny_config
from relax_core.families.tiny_omni import tiny_omni_config, tiny_omni_files
from relax_core.families.vision.tower import build_tower, pass_items
from relax_core.plan.model.model_source import SHAPES
from relax_core.tools.tiny_vision import write_settings

OMNI = "tiny_qwen3_omni"
SEEING = {
    VISION: "Qwen3VLForConditionalGeneration",
    VISION_EXPERTS: "Qwen3VLMoeForConditionalGeneration",
    HYBRID: "Qwen3_5ForConditionalGeneration",
    HYBRID_EXPERTS: "Qwen3_5MoeForConditionalGeneration",
    OMNI: "Qwen3OmniMoeThinkerForConditionalGeneration",
}


def counted(work: Callable[[], Any]) -> int:
    """Returns the multiplications of what ``work`` computes; torch counts each as two operations."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops()) // 2


def config_of(name: str) -> dict[str, Any]:
    return tiny_omni_config() if name == OMNI else tiny_config(name)


def architecture_of(name: str, folder: Path) -> Architecture:
    write_settings(folder, config_of(name), tiny_omni_files() if name == OMNI else processor_files())
    return folder_architecture(folder)


def tower_module(tower: Any) -> torch.nn.Module:
    """Builds a tower whose attention is made of products that torch counts, as it does not count its fused one."""
    module = build_tower(tower, dtype=torch.float32)
    module.config._attn_implementation = "eager"  # type: ignore[union-attr]
    return module


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("grid", [(1, 4, 4), (1, 12, 6), (5, 8, 4)], ids=["small", "image", "video"])
def test_the_products_of_a_vision_tower_are_those_that_torch_counts(
    name: str, grid: tuple[int, int, int], tmp_path: Path
) -> None:
    tower = architecture_of(name, tmp_path).vision
    assert tower is not None
    time, height, width = grid
    shape = (time * tower.temporal_patch_size, height * tower.patch_size, width * tower.patch_size, 3)
    module = tower_module(tower)
    found = counted(lambda: pass_items(module, tower, [np.zeros(shape, dtype=np.uint8)], [grid]))
    assert vision_products(tower, grid) == pytest.approx(found, rel=0.002)  # torch counts rotary angles, too


@pytest.mark.parametrize("frames", [10, 100, 130, 730, 3000])
def test_the_products_of_an_audio_tower_are_those_that_torch_counts(frames: int, tmp_path: Path) -> None:
    tower = architecture_of(OMNI, tmp_path).audio
    assert tower is not None
    module = tower_module(tower)
    found = counted(lambda: pass_sounds(module, tower, [np.zeros((tower.mel_bins, frames), dtype=np.float32)]))
    assert audio_products(tower, frames) == found


@pytest.mark.parametrize("name", SEEING)
def test_the_products_of_a_row_are_those_that_torch_counts(name: str, tmp_path: Path) -> None:
    """The scores of attention grow with the square of the rows, so that they are the second difference."""
    one, config = architecture_of(name, tmp_path), inner_config(config_of(name))
    model_class = getattr(transformers, SEEING[name])
    model = model_class(model_class.config_class.from_dict(dict(config) | {"attn_implementation": "eager"})).model
    model = getattr(model, "language_model", model)

    def of_rows(rows: int) -> int:
        values = torch.zeros(1, rows, one.hidden_size)
        return counted(lambda: model(inputs_embeds=values, use_cache=False))

    print(name, of_rows(1), of_rows(2), of_rows(3), row_products(one))
