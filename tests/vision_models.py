"""Helpers for tests of vision models: random models in the published layout, items, and transformers' log-probs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.media_file import FolderReader
from relax_core.families.architecture import VisionTower
from relax_core.families.folder import folder_architecture
from relax_core.families.tiny_configs import processor_files, tiny_config
from relax_core.families.tower_passes import patches_of
from relax_core.tools.tiny_media import write_published
from tests.media_items import item_of

DENSE, EXPERTS = "tiny_qwen3_vl", "tiny_qwen3_vl_moe"
HYBRIDS = ("tiny_qwen3_5", "tiny_qwen3_5_moe")
FIRST_TEXT = 7  # ids from this id to LAST_TEXT are characters
LAST_TEXT = 50


def make_tiny_vision_model(folder: Path | None, *, name: str = DENSE, seed: int = 0, layers: int | None = None) -> Any:
    """Makes a random model with distributions far from flat, and writes it in the published layout to ``folder``.

    ``layers`` replaces the number of the language model's layers.
    """
    import transformers

    config = tiny_config(name)
    if layers is not None:
        config["text_config"]["num_hidden_layers"] = layers
    torch.manual_seed(seed)
    model_class = getattr(transformers, config["architectures"][0])
    model = model_class(model_class.config_class.from_dict(config)).float().eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # In Qwen3.5 the norms of the language model multiply by 1 + weight, except the norms of delta nets.
                centred = name in HYBRIDS and "language_model" in label and "linear_attn" not in label
                centre = 1.0 if "norm" in label and not centred else 0.0
                parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
            elif label.endswith("conv1d.weight"):
                parameter.normal_(std=0.5)
            else:
                # With 1.2, transformers' two rules for a delta net differ by 5e-5 in log-probs.
                size = 0.4 if name in HYBRIDS else 1.2
                parameter.normal_(std=size / parameter[0].numel() ** 0.5 if parameter.ndim != 3 else 0.15)
    if folder is not None:
        write_folder(model, folder, config)
    return model


def write_folder(model: Any, folder: Path, config: dict[str, Any]) -> None:
    """Writes config.json, the processors' files and the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, values in {"config.json": config, **processor_files()}.items():
        (folder / file).write_text(json.dumps(values))
    write_published(model, folder)


@dataclass
class Seen:
    """Makes media items of a model, and prompts with these items. Writes the items' files to ``folder``."""

    model_folder: Path
    folder: Path
    tower: VisionTower = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tower = folder_architecture(self.model_folder).vision
        assert tower is not None
        self.tower = tower

    def image(self, height: int, width: int, *, seed: int = 0) -> MediaItem:
        """Encodes a random image of ``height`` by ``width`` rows."""
        return item_of(self.tower, _noise(1, height, width, self.tower, seed), folder=self.folder)

    def video(self, steps: int, height: int, width: int, *, seed: int = 0) -> MediaItem:
        """Encodes a random video of ``steps`` steps of ``height`` by ``width`` rows, with random time stamps."""
        rng = np.random.default_rng(seed)
        stamps = [rng.integers(FIRST_TEXT, LAST_TEXT, 3 + step % 2).tolist() for step in range(steps)]
        frames = _noise(steps * self.tower.temporal_patch_size, height, width, self.tower, seed)
        return item_of(self.tower, frames, stamps=stamps, folder=self.folder)

    def prompt(self, *parts: Sequence[int] | MediaItem) -> tuple[list[int], list[Media]]:
        """Returns the token ids of texts and items in order, and the positions of the items.

        An image is between the tokens that begin and end vision, as in the chat template.
        """
        ids: list[int] = []
        media: list[Media] = []
        for part in parts:
            if not isinstance(part, MediaItem):
                ids += part
                continue
            around = part.kind == "image"
            ids += [self.tower.vision_start_token_id] * around
            media.append(Media(part, len(ids), len(ids) + part.rows))
            ids += part.ids.tolist()
            ids += [self.tower.vision_end_token_id] * around
        return ids, media

    def logits(self, model: Any, ids: Sequence[int], media: Sequence[Media]) -> Any:
        """Returns transformers' logits of one sequence, with rotary positions by transformers."""
        reader = FolderReader(self.folder)
        token_ids = torch.tensor([list(ids)])
        types = (token_ids == self.tower.image_token_id) * 1 + (token_ids == self.tower.video_token_id) * 2
        given: dict[str, Any] = {}
        for kind, pixels, grids in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            items = [medium.item for medium in media if medium.item.kind == kind]
            if items:
                patches = [patches_of(reader.tensors(item)["frames"], self.tower) for item in items]
                given[pixels] = torch.cat(patches)
                given[grids] = torch.tensor([item.grid for item in items])
        more = {"output_router_logits": True} if hasattr(model.config.get_text_config(), "num_experts") else {}
        model.model.rope_deltas = None
        with torch.no_grad():
            return model(input_ids=token_ids, mm_token_type_ids=types, use_cache=False, **given, **more)

    def logprobs(self, model: Any, ids: Sequence[int], media: Sequence[Media]) -> torch.Tensor:
        """Returns transformers' log-prob of each token after the first, ``[tokens - 1]``."""
        table = self.logits(model, ids, media).logits[0, :-1].log_softmax(-1)
        return table.gather(-1, torch.tensor(list(ids[1:]))[:, None])[:, 0]


def text(length: int, *, seed: int = 0) -> list[int]:
    """Returns random characters."""
    return np.random.default_rng(seed + 1000 * length).integers(FIRST_TEXT, LAST_TEXT, length).tolist()


def _noise(frames: int, height: int, width: int, tower: VisionTower, seed: int) -> np.ndarray:
    size = tower.patch_size * tower.merge_size
    shape = (frames, height * size, width * size, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
