"""Compares the work of a media item, in rows, with the products that torch counts in transformers' modules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from relax_core.contracts.media import MediaItem
from relax_core.families.architecture import Architecture
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import inner_config
from relax_core.families.tiny_configs import (
    HYBRID,
    HYBRID_EXPERTS,
    VISION,
    VISION_EXPERTS,
    processor_files,
    tiny_config,
    tiny_omni_config,
    tiny_omni_files,
)
from relax_core.families.tower_passes import build_tower, pass_items, pass_sounds
from relax_core.families.towers import audio_products, item_work, row_products, vision_products
from relax_core.plan.model_dimensions import SHAPES
from relax_core.tools.tiny_media import write_settings

OMNI = "tiny_qwen3_omni"
SEEING = {
    VISION: "Qwen3VLForConditionalGeneration",
    VISION_EXPERTS: "Qwen3VLMoeForConditionalGeneration",
    HYBRID: "Qwen3_5ForConditionalGeneration",
    HYBRID_EXPERTS: "Qwen3_5MoeForConditionalGeneration",
    OMNI: "Qwen3OmniMoeThinkerForConditionalGeneration",
}


def counted(work: Callable[[], Any]) -> int:
    """Returns the number of multiplications in ``work``. torch counts each multiplication as two operations."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops()) // 2


def config_of(name: str) -> dict[str, Any]:
    return tiny_omni_config() if name == OMNI else tiny_config(name)


def architecture_of(name: str, folder: Path) -> Architecture:
    write_settings(folder, config_of(name), tiny_omni_files() if name == OMNI else processor_files())
    return folder_architecture(folder)


def tower_module(tower: Any) -> Any:
    """Builds a tower with eager attention, because torch does not count the products of fused attention."""
    module: Any = build_tower(tower, dtype=torch.float32)
    module.config._attn_implementation = "eager"
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
    assert vision_products(tower.config, grid) == pytest.approx(found, rel=0.002)  # torch also counts rotary angles


@pytest.mark.parametrize("frames", [10, 100, 130, 730, 3000])
def test_the_products_of_an_audio_tower_are_those_that_torch_counts(frames: int, tmp_path: Path) -> None:
    tower = architecture_of(OMNI, tmp_path).audio
    assert tower is not None
    module = tower_module(tower)
    found = counted(lambda: pass_sounds(module, tower, [np.zeros((tower.mel_bins, frames), dtype=np.float32)]))
    assert audio_products(tower.config, frames) == found


def no_delta_rule(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Replaces the delta rule, because torch does not count the products of the recurrent form."""
    return torch.zeros_like(value), None


@pytest.mark.parametrize("name", SEEING)
def test_the_products_of_a_row_are_those_that_torch_counts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention scores grow with the square of the rows, so they are the second difference."""
    architecture, config = architecture_of(name, tmp_path), dict(inner_config(config_of(name)))
    model_class = getattr(transformers, SEEING[name])
    monkeypatch.setattr(
        sys.modules[model_class.__module__], "torch_chunk_gated_delta_rule", no_delta_rule, raising=False
    )
    settings = model_class.config_class.from_dict(config)
    model = model_class._from_config(settings, attn_implementation="eager", experts_implementation="eager").model
    model = getattr(model, "language_model", model)

    def of_rows(rows: int) -> int:
        values = torch.randn(1, rows, architecture.hidden_size)
        return counted(lambda: model(inputs_embeds=values, use_cache=False))

    few, more, most = of_rows(1), of_rows(2), of_rows(3)
    found = more - few - 3 * (most - 2 * more + few) // 2
    net = architecture.delta_net
    if net is not None:  # products that read the state, write the state and compute the output
        found += len(architecture.delta_layers) * 3 * net.value_heads * net.key_dim * net.value_dim
    assert row_products(architecture) == found


def item_of(*, grid: tuple[int, int, int] = (0, 0, 0), audio_frames: int = 0) -> MediaItem:
    """Makes an item that has only sizes."""
    return MediaItem(
        kind="image", digest="", token_ids=b"", offsets=b"", advance=1, placeholder=[], grid=list(grid), width=1,
        height=1, audio_frames=audio_frames,
    )  # fmt: skip


def test_an_image_of_the_published_model_is_as_much_work_as_its_rows(tmp_path: Path) -> None:
    config, tiny = json.loads((SHAPES / "Qwen3-Omni-30B-A3B.json").read_text()), tiny_omni_config()["thinker_config"]
    for part in ("vision_config", "audio_config"):  # the published sizes lack sizes that a memory plan does not need
        config["thinker_config"][part] = tiny[part] | config["thinker_config"][part]
    config["thinker_config"] = tiny | config["thinker_config"]
    settings = tiny_omni_files()
    settings["preprocessor_config.json"] |= {"patch_size": 16, "feature_size": 128}
    write_settings(tmp_path, config, settings)
    architecture = folder_architecture(tmp_path)
    assert item_work(architecture, item_of(grid=(1, 64, 64))) == pytest.approx(1024, rel=0.05)
    sound = item_work(architecture, item_of(audio_frames=3000))
    both = item_work(architecture, item_of(grid=(1, 64, 64), audio_frames=3000))
    assert both == pytest.approx(sound + item_work(architecture, item_of(grid=(1, 64, 64))))
    assert sound == pytest.approx(115, abs=1)  # 390 rows: 67 G products of convolutions, 248 G products of the layers
    assert item_work(replace(architecture, vision=None, audio=None), item_of(audio_frames=3000)) == 0.0
