"""Makes the vision models and the media groups of `benchmarks.parity`. Also computes Hugging Face's logits."""

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
from relax_core.contracts.tree import NOT_SAMPLED, Episode, TokenTree
from relax_core.families.architecture import VisionTower
from relax_core.families.folder import folder_architecture
from relax_core.families.tower_passes import patches_of
from tests.media_items import item_of
from tests.trees import answers_tree

DENSE, EXPERTS = "qwen3_vl", "qwen3_vl_moe"
HYBRID, HYBRID_EXPERTS = "qwen3_5", "qwen3_5_moe"
WORDS, IMAGE, VIDEO, BEGIN, END = 50, 50, 51, 52, 53  # number of text tokens, then the ids of media tokens
AUDIO, AUDIO_BEGIN, AUDIO_END = 54, 55, 56  # of Qwen3-Omni
LAYERS, EXPERT_COUNT, PER_TOKEN = 8, 4, 2
PATCH = 4
# Image grids (height, width) of the case with many image sizes.
SIZES = ((2, 2), (4, 6), (8, 2))
CASES = ("one image", "many sizes", "video", "branches", "text", "mixed")
HYBRID_CASES = (*CASES, "trunks", "depth")  # for families with a gated delta net
Shape = tuple[int, list[Any]]  # number of rows, then the shapes of the branches after the last row
Part = int | MediaItem  # a number of random text tokens, or a media item


def make_model(folder: Path, family: str) -> Any:
    """Returns a tiny random model of eight layers. Tower features are added after each of the first two layers."""
    import transformers

    from relax_core.tools.tiny_media import write_published

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
    if family in (EXPERTS, HYBRID_EXPERTS):
        text |= {"num_experts": EXPERT_COUNT, "num_experts_per_tok": PER_TOKEN, "moe_intermediate_size": 24}
    if family == EXPERTS:
        text |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if family in (HYBRID, HYBRID_EXPERTS):
        text |= _HYBRID_TEXT | ({"shared_expert_intermediate_size": 40} if family == HYBRID_EXPERTS else {})
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
    if family in (HYBRID, HYBRID_EXPERTS):
        del vision["deepstack_visual_indexes"]
    config = getattr(transformers, f"{_CLASSES[family]}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        tie_word_embeddings=family in (DENSE, HYBRID),
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{_CLASSES[family]}ForConditionalGeneration")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger weights would amplify the rounding before the norms that follow the gated delta nets.
            noise = torch.randn_like(parameter) * (0.1 if family in (DENSE, EXPERTS) else 0.07)
            parameter.copy_(parameter + noise if "norm" in name else noise)
            if name.endswith("conv1d.weight"):
                parameter.copy_(5.0 * noise)
            if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
                # Keys similar to queries avoid outputs near zero. The next norm would amplify the rounding of such
                # outputs.
                query, key = parameter[:_KEYS], parameter[_KEYS : 2 * _KEYS]
                key.copy_(query + 0.3 * key)
            if name.endswith("A_log"):  # states decay over a few to hundreds of rows
                parameter.copy_(torch.linspace(-5.0, 1.0, len(parameter)))
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    pixels = {"shortest_edge": 64, "longest_edge": 2**20}
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": pixels}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps(processor))
    write_published(model, folder)
    return model


_CLASSES = {DENSE: "Qwen3VL", EXPERTS: "Qwen3VLMoe", HYBRID: "Qwen3_5", HYBRID_EXPERTS: "Qwen3_5Moe"}
_HYBRID_TEXT: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [2, 2, 2],
        "partial_rotary_factor": 0.75,
    },
}
_KEYS = _HYBRID_TEXT["linear_num_key_heads"] * _HYBRID_TEXT["linear_key_head_dim"]


class Items:
    """Makes random images and videos and writes their files into ``folder``."""

    def __init__(self, model_folder: Path, folder: Path) -> None:
        tower = folder_architecture(model_folder).vision
        assert tower is not None
        self._tower, self._folder, self._random = tower, folder, np.random.default_rng(5)
        folder.mkdir(exist_ok=True)

    def image(self, height: int, width: int) -> MediaItem:
        """Returns an image of ``height`` × ``width`` patches."""
        return item_of(self._tower, self._pixels(1, height, width), folder=self._folder)

    def video(self, time: int, height: int, width: int) -> MediaItem:
        stamps = [[1, 2 + step] for step in range(time)]
        return item_of(self._tower, self._pixels(2 * time, height, width), stamps=stamps, folder=self._folder)

    def _pixels(self, frames: int, height: int, width: int) -> np.ndarray:
        return self._random.integers(0, 256, (frames, height * PATCH, width * PATCH, 3), dtype=np.uint8)


def make_case(case: str, items: Items) -> list[TokenTree]:
    """Returns the groups of a case. In the case "mixed" the last group has text only."""
    many = [items.image(*size) for size in SIZES]
    video = items.video(2, 4, 4)
    groups = {
        "one image": [group("g0", [3, many[1], 2], [[4], [1], [6]])],
        "many sizes": [group("g0", [2, *many, 1], [[5], [3]]), group("g1", [1, many[2], 3, many[0], 2], [[2], [7]])],
        "video": [group("g0", [2, video, 3], [[4], [6]])],
        "branches": [group("g0", [2, many[0], 1], [[3, many[1], 4], [5], [2, video, 1, many[0], 3]])],
        "text": [group("g0", [5], [[4], [2], [6]]), group("g1", [9], [[3], [5]])],
        "trunks": [group(f"g{trunk}", [trunk], [[length] for length in lengths]) for trunk, lengths in _TRUNKS.items()],
        "depth": [deep_group("g0", _DEEP), group("g1", [4], [[3]]), deep_group("g2", (2, [_DEEP, (1, [])]))],
    }
    groups["mixed"] = [
        *groups["many sizes"],
        *groups["branches"],
        group("v", [4, video, 2, many[1], 1], [[4], [1], [6]]),
        *groups["text"],
    ]
    return [dataclasses.replace(tree, group_uid=f"g{place}") for place, tree in enumerate(groups[case])]


def group(uid: str, prompt: Sequence[Part], answers: Sequence[Sequence[Part]]) -> TokenTree:
    """Returns a group of a prompt and its answers. An env returns the items in an answer: they are not sampled."""
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


def around_item(item: MediaItem) -> tuple[list[int], list[int]]:
    """Returns the tokens that the chat template adds around an item. A video with time stamps already contains them."""
    if item.kind == "audio":
        return [AUDIO_BEGIN], [AUDIO_END]
    return ([BEGIN], [END]) if item.kind == "image" or item.fractional else ([], [])


_TRUNKS = {1: (1, 65), 3: (200, 2), 63: (64, 1, 7), 64: (63, 5), 65: (3, 130), 200: (1, 200, 66)}
_DEEP: Shape = (5, [(3, [(2, [(4, []), (66, [])]), (1, [])]), (64, [(1, [(2, []), (3, [])])]), (1, [])])


def deep_group(uid: str, shape: Shape) -> TokenTree:
    """Returns a random tree. Its first rows are the prompt, and each leaf is an episode."""
    end, leaves = list[int](), list[int]()

    def grow(rows: int, forks: Sequence[Shape]) -> None:
        first = len(end)
        end.extend([0] * rows)
        for fork in forks:
            grow(*fork)
        end[first : first + rows] = [len(end)] * rows
        if not forks:
            leaves.append(first + rows - 1)

    grow(*shape)
    random = np.random.default_rng(len(end))
    sampled = np.arange(len(end)) >= shape[0]
    tree = TokenTree(
        group_uid=uid,
        token_ids=random.integers(0, WORDS, len(end)).astype(np.int32),
        end=np.array(end, dtype=np.int32),
        loss_mask=sampled,
        logprobs=np.zeros(len(end), dtype=np.float32),
        versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
        episodes=[Episode(f"{uid}.{place}", [leaf], 0.0, {}, [], "stop") for place, leaf in enumerate(leaves)],
    )
    of_episodes = random.standard_normal(len(leaves)).astype(np.float32)
    return tree.with_extras(advantages=of_episodes[tree.tokens[0]])


def _rows(parts: Sequence[Part], start: int, random: np.random.Generator) -> tuple[list[int], list[Media], list[bool]]:
    ids, media, sampled = list[int](), list[Media](), list[bool]()
    for part in parts:
        if isinstance(part, MediaItem):
            around = around_item(part)
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
    """Returns transformers' logits of a tree without forks, ``[rows, vocabulary]``."""
    ids = torch.from_numpy(tree.token_ids).long()[None]
    inputs: dict[str, Tensor] = {}
    names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
    for kind, (pixels, grids) in names.items():
        own = [medium.item for medium in tree.media if medium.item.kind == kind]
        if own:
            inputs[pixels] = torch.cat([patches_of(reader.tensors(item)["frames"], tower) for item in own])
            inputs[grids] = torch.tensor([item.grid for item in own])
    kinds = torch.where(ids == IMAGE, 1, torch.where(ids == VIDEO, 2, 0)).int()
    logits = model(input_ids=ids, mm_token_type_ids=kinds, **inputs).logits[0]
    assert isinstance(logits, Tensor)
    return logits


def published(family: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a model's tensors in the format of its folder: the experts of Qwen3-VL are transposed."""
    return {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name and family == EXPERTS else tensor
        for name, tensor in tensors.items()
    }
