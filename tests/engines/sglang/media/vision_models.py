"""Makes tiny random vision models, and items in the encoder's format, for the tests of SGLang with media."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax_core.contracts.engine import PromptRequest
from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.rotary import rotary_of_sequence
from relax_core.families.architecture import VisionTower
from relax_core.families.tiny_configs import processor_files, tiny_config
from relax_core.families.tower_passes import patches_of
from relax_core.families.vision_tower import feature_rows
from relax_core.tools.tiny_media import write_published
from relax_core.tools.tiny_text import build_tokenizer
from tests.media_items import item_of

FPS = 2.0


def make_vision_model(folder: Path | None, *, name: str, seed: int) -> Any:
    """Makes a random builtin model with distributions far from uniform. Writes the model if a folder is given."""
    import transformers

    torch.manual_seed(seed)
    config = tiny_config(name)
    model_class = getattr(transformers, config["architectures"][0])
    model = model_class(model_class.config_class.from_dict(config)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
    if folder is not None:
        build_tokenizer(vision=True).save_pretrained(folder)
        for file, values in {"config.json": config, **processor_files()}.items():
            (folder / file).write_text(json.dumps(values))
        write_published(model, folder)
    return model


def published_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Returns the weights with names and layout of the published model."""
    tied = model.config.tie_word_embeddings
    return [
        (name, (weight.transpose(1, 2) if ".mlp.experts." in name else weight).contiguous())
        for name, weight in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    ]


def frames_of(*shape: int, seed: int) -> np.ndarray:
    """Returns noise, uint8 ``[frames, height, width, 3]``."""
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def encoded(frames: np.ndarray, tower: VisionTower, folder: Path, *, is_video: bool = False) -> MediaItem:
    """Writes frames as a media item into the folder."""
    if not is_video:
        return item_of(tower, frames, folder=folder)
    tokenizer = build_tokenizer(vision=True)
    steps = -(-len(frames) // tower.temporal_patch_size)
    stamps = [tokenizer.encode(f"<{step * 2 / FPS + 0.5 / FPS:.1f} seconds>") for step in range(steps)]
    return item_of(tower, frames, stamps=stamps, folder=folder)


def prompt(*parts: list[int] | MediaItem, rid: str = "p", seed: int = 1) -> PromptRequest:
    """Returns a prompt of text ids and items. The caller's ids include the two marks of an image."""
    ids: list[int] = []
    media: list[Media] = []
    for part in parts:
        if isinstance(part, MediaItem):
            media.append(Media(part, len(ids), len(ids) + part.rows))
            ids += part.ids.tolist()
        else:
            ids += part
    return PromptRequest(rid=rid, input_ids=ids, sampling_seed=seed, media=media)


def reference_logprobs(
    model: Any, tower: VisionTower, request: PromptRequest, frames: list[np.ndarray], output_ids: list[int]
) -> torch.Tensor:
    """Returns transformers' log-probs of generated tokens, ``[tokens]``. ``frames``: the items' frames in order."""
    ids = torch.tensor([request.input_ids + output_ids])
    positions = torch.from_numpy(rotary_of_sequence(ids.shape[1], request.media)[0])[:, None]
    inputs: dict[str, Any] = {}
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [
            (medium, array) for medium, array in zip(request.media, frames, strict=True) if medium.item.kind == kind
        ]
        if chosen:
            inputs[pixels] = torch.cat([patches_of(array, tower) for _, array in chosen])
            inputs[grid] = torch.tensor([medium.item.grid for medium, _ in chosen])
    if inputs:
        seen = feature_rows(tower, ids[0].numpy()).astype(int)
        inputs["mm_token_type_ids"] = torch.from_numpy(seen * (1 + (ids[0].numpy() == tower.video_token_id)))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, **inputs).logits[0, len(request.input_ids) - 1 : -1]
    chosen_ids = torch.tensor(output_ids)[:, None]
    return logits.log_softmax(-1).gather(-1, chosen_ids)[:, 0]
