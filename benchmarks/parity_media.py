"""Makes the models that see and the groups with media of `benchmarks.parity`, and Hugging Face's log-probs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.media_file import FolderReader
from relax_core.contracts.tree import NOT_SAMPLED, TokenTree
from relax_core.families.architecture import VisionTower
from relax_core.families.folder import folder_architecture
from relax_core.families.vision.patches import patches_of
from tests.media_items import item_of
from tests.trees import answers_tree

DENSE, EXPERTS = "qwen3_vl", "qwen3_vl_moe"
WORDS, IMAGE, VIDEO, BEGIN, END = 50, 50, 51, 52, 53  # the tokens of text, and those of media behind them
LAYERS, EXPERT_COUNT, PER_TOKEN = 8, 4, 2
PATCH = 4
# Image grids (height, width) of a pack with many sizes.
SIZES = ((2, 2), (4, 6), (8, 2))
CASES = ("one image", "many sizes", "video", "branches", "text", "mixed")
Part = int | MediaItem  # a number of random text tokens, or an item


def make_model(folder: Path, family: str) -> Any:
    """Returns a tiny random model of eight layers; the tower's outputs are added after its first two."""
    import transformers

    from relax_core.tools.tiny_vision import write_published

    text: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]},
    }
    if family == EXPERTS:
        text |= {"num_experts": EXPERT_COUNT, "num_experts_per_tok": PER_TOKEN, "moe_intermediate_size": 24}
        text |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "in_channels": 3,
    }
    made = {DENSE: ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration"),
            EXPERTS: ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration")}[family]  # fmt: skip
    config = getattr(transformers, made[0])(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        tie_word_embeddings=family == DENSE,
    )
    torch.manual_seed(0)
    model = getattr(transformers, made[1])(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(parameter + noise if "norm" in name else noise)
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    pixels = {"shortest_edge": 64, "longest_edge": 2**20}
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": pixels}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps(processor))
    write_published(model, folder)
    return model


class Items:
    """Makes random images and videos, whose files are in ``folder``."""

    def __init__(self, model_folder: Path, folder: Path) -> None:
        tower = folder_architecture(model_folder).vision
        assert tower is not None
        self._tower, self._folder, self._random = tower, folder, np.random.default_rng(5)
        folder.mkdir(exist_ok=True)

    def image(self, height: int, width: int) -> MediaItem:
        """Returns an image of so many patches."""
        return item_of(self._tower, self._pixels(1, height, width), folder=self._folder)

    def video(self, time: int, height: int, width: int) -> MediaItem:
        stamps = [[1, 2 + step] for step in range(time)]
        return item_of(self._tower, self._pixels(2 * time, height, width), stamps=stamps, folder=self._folder)

    def _pixels(self, frames: int, height: int, width: int) -> np.ndarray:
        return self._random.integers(0, 256, (frames, height * PATCH, width * PATCH, 3), dtype=np.uint8)


def make_case(case: str, items: Items) -> list[TokenTree]:
    """Returns the groups of a case; the last one is text alone where the case is "mixed"."""
    many = [items.image(*size) for size in SIZES]
    video = items.video(2, 4, 4)
    groups = {
        "one image": [group("g0", [3, many[1], 2], [[4], [1], [6]])],
        "many sizes": [group("g0", [2, *many, 1], [[5], [3]]), group("g1", [1, many[2], 3, many[0], 2], [[2], [7]])],
        "video": [group("g0", [2, video, 3], [[4], [6]])],
        "branches": [group("g0", [2, many[0], 1], [[3, many[1], 4], [5], [2, video, 1, many[0], 3]])],
        "text": [group("g0", [5], [[4], [2], [6]]), group("g1", [9], [[3], [5]])],
    }
    groups["mixed"] = [
        *groups["many sizes"],
        *groups["branches"],
        group("v", [4, video, 2, many[1], 1], [[4], [1], [6]]),
        *groups["text"],
    ]
    return [dataclasses.replace(one, group_uid=f"g{place}") for place, one in enumerate(groups[case])]


def group(uid: str, prompt: Sequence[Part], answers: Sequence[Sequence[Part]]) -> TokenTree:
    """Returns a prompt and its answers. An environment shows the items of an answer, so nothing samples them."""
    random = np.random.default_rng(len(prompt) + 10 * len(answers))
    trunk, media, _ = _rows(prompt, 0, random)
    ids, lengths, sampled = list[int](), list[int](), list[bool]()
    for answer in answers:
        own, own_media, own_sampled = _rows(answer, len(trunk) + len(ids), random)
        ids, media, sampled = ids + own, media + own_media, sampled + own_sampled
        lengths.append(len(own))
    versions = np.where(sampled, 0, NOT_SAMPLED)
    tree = answers_tree(uid, trunk, lengths, ids, loss_mask=np.array(sampled), versions=versions)
    tree = dataclasses.replace(tree, media=media)
    of_episodes = random.standard_normal(len(answers)).astype(np.float32)
    return tree.with_extras(advantages=of_episodes[tree.tokens[0]])


def _rows(parts: Sequence[Part], start: int, random: np.random.Generator) -> tuple[list[int], list[Media], list[bool]]:
    ids, media, sampled = list[int](), list[Media](), list[bool]()
    for part in parts:
        if isinstance(part, MediaItem):
            around = ([BEGIN], [END]) if part.kind == "image" else ([], [])  # a video's rows have their own
            first = start + len(ids) + len(around[0])
            media.append(Media(part, first, first + part.rows))
            own = [*around[0], *part.ids.tolist(), *around[1]]
            ids += own
            sampled += [False] * len(own)
        else:
            ids += random.integers(0, WORDS, part).tolist()
            sampled += [True] * part
    return ids, media, sampled


def huggingface_logits(model: Any, tree: TokenTree, reader: FolderReader, tower: VisionTower) -> Tensor:
    """Returns the logits of a tree of one chain, ``[rows, vocabulary]``; transformers derives all positions."""
    ids = torch.from_numpy(tree.token_ids).long()[None]
    inputs: dict[str, Tensor] = {}
    names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
    for kind, (pixels, grids) in names.items():
        own = [one.item for one in tree.media if one.item.kind == kind]
        if own:
            inputs[pixels] = torch.cat([patches_of(reader.tensors(one)["frames"], tower) for one in own])
            inputs[grids] = torch.tensor([one.grid for one in own])
    kinds = torch.where(ids == IMAGE, 1, torch.where(ids == VIDEO, 2, 0)).int()
    logits = model(input_ids=ids, mm_token_type_ids=kinds, **inputs).logits[0]
    assert isinstance(logits, Tensor)
    return logits


def published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a model's tensors as its folder has them: experts are transposed there."""
    return {name: one.transpose(1, 2).contiguous() if ".mlp.experts." in name else one for name, one in tensors.items()}
