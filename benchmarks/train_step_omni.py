"""Measures a train step of a Qwen3-Omni against one of the text model with experts, for `benchmarks.train_step_media`.

Both language models have the sizes of `benchmarks.train_step`'s MoE and compute as many rows. A prompt has two images
of 256 rows, a video of 128 rows and two clips of 7.3 s. The towers' time alone, forward and backward, is subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parity_media import around_item
from benchmarks.parity_omni import OMNI, OmniItems, make_omni_model
from benchmarks.train_step_media import ANSWER, BETWEEN, LANGUAGE_ANSWERS, LANGUAGE_GROUPS, seconds_of, tell_language
from benchmarks.train_step_ways import SIZES, Ours, make_groups, write_model
from relax_core.contracts.media import Media
from relax_core.contracts.media_file import FolderReader
from relax_core.contracts.tree import TokenTree
from relax_core.families.folder import folder_architecture
from relax_core.families.tower_passes import inputs_of, pass_towers
from relax_core.families.towers import Towers
from tests.trees import answers_tree

CLIP, SIDE = 730, 32  # frames of a clip, patches of an image's side


def omni_language(folder: Path, *, repeats: int) -> dict[str, Any]:
    """Returns the time of the language part of an Omni step over that of a text step, repeat by repeat."""
    size = SIZES["moe"]
    make_omni_model(
        folder / "omni",
        size=0.02,
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        num_experts=size.experts,
        num_experts_per_tok=2,
        moe_intermediate_size=size.feed_forward,
        max_position_embeddings=16384,
        rope_scaling={
            "rope_type": "default",
            "interleaved": True,
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],
        },
    )
    items = OmniItems(folder / "omni", folder / "media")
    groups = [_group(f"g{place}", items) for place in range(LANGUAGE_GROUPS)]
    trunk = groups[0].computed_rows - LANGUAGE_ANSWERS * (ANSWER - 1)
    lengths = np.full((LANGUAGE_GROUPS, LANGUAGE_ANSWERS), ANSWER)
    plain = make_groups(lengths, prompt=trunk, vocabulary=size.vocabulary)
    assert [one.computed_rows for one in plain] == [one.computed_rows for one in groups]
    reader = FolderReader(folder / "media")
    omni = Ours(folder / "omni", family=OMNI, media=reader)
    text = Ours(write_model(folder / "text", size), family="qwen3_moe")
    towers = Towers.of(folder_architecture(folder / "omni"))
    assert towers is not None
    budget = groups[0].computed_rows
    ways = {
        "text": lambda: seconds_of(lambda: text.step(plain, budget_rows=budget)),
        "pictures": lambda: seconds_of(lambda: omni.step(groups, budget_rows=budget)),
        "tower": lambda: _tower_seconds(groups, towers, omni, reader),
    }
    title = f"language part of Omni over a step of the text MoE, {LANGUAGE_GROUPS} groups of {budget:,} rows"
    return tell_language(title, ways, repeats=repeats)


def _group(uid: str, items: OmniItems) -> TokenTree:
    random = np.random.default_rng(len(uid))
    ids: list[int] = []
    media: list[Media] = []
    two = [items.image(SIDE, SIDE), items.clip(CLIP)]
    for item in (*two, items.video(2, SIDE // 2, SIDE // 2), items.image(SIDE, SIDE), items.clip(CLIP)):
        before, behind = around_item(item)
        ids += [*random.integers(0, 50, BETWEEN).tolist(), *before]
        media.append(Media(item, len(ids), len(ids) + item.rows))
        ids += [*item.ids.tolist(), *behind]
    lengths = np.full(LANGUAGE_ANSWERS, ANSWER)
    advantages = random.standard_normal(LANGUAGE_ANSWERS).astype(np.float32)
    tree = answers_tree(
        uid,
        np.array(ids, dtype=np.int32),
        lengths,
        random.integers(100, 8000, int(lengths.sum()), dtype=np.int32),
        logprobs=-1.0,
        advantages=np.repeat(advantages, lengths),
    )
    return replace(tree, media=media)


def _tower_seconds(groups: Sequence[TokenTree], towers: Towers, model: Ours, reader: FolderReader) -> float:
    """Returns the CPU seconds of the towers' passes of a step over groups that are micro-batches of their own."""
    start = time.process_time()
    for group in groups:
        own = [one.item for one in group.media]
        inputs = inputs_of(own, [reader.tensors(item) for item in own])
        pass_towers(inputs, towers, vision=model.vision, audio=model.audio).sum().backward()
    return time.process_time() - start
