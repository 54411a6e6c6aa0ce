"""Measures train steps over prompts with images.

    python -m benchmarks.train_step_media [--parts language trees hybrid] [--rounds 5] [--json FILE]

- ``language``: a step over prompts with images, compared with a step of the text model of equal size over the same
  number of rows. The time of the vision tower (forward and backward) is measured separately and subtracted.
- ``trees``: groups as trees compared with groups as rows. A tree computes prompt and images once; rows repeat them for
  each answer. Answers have 64 tokens; a prompt has 1,024 or 4,096 rows of images.
- ``hybrid``: like ``trees``, with a Qwen3.5: three of four language layers have a gated delta net.

An image has 256 rows, which are 1,024 patches. Prints the tower's share of the matrix products of a step over images;
for Qwen3-VL-4B with images of this size it is 0.25. Times are CPU seconds of one thread. The ways alternate.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import ONE_THREAD, Comparison, Metrics, command_line, machine, take_turns

if TYPE_CHECKING:
    from benchmarks.train_step_ways import Size
    from relax_core.contracts.media import MediaItem
    from relax_core.contracts.tree import TokenTree

PATCH, SIDE = 4, 32  # pixels of a patch, patches of an image's side
IMAGE_ROWS = (SIDE // 2) ** 2
ANSWER, BETWEEN = 64, 8  # tokens of an answer, tokens of text between two images
TREES = ((1024, 8), (4096, 16))  # image rows, answers
SEEING, HYBRID = "qwen3_vl", "qwen3_5"
TREE_REACH = {SEEING: (5.0, 10.0), HYBRID: (3.0, 6.0)}  # targets for the ratios
LANGUAGE_BOUND = 1.10
LANGUAGE_GROUPS, LANGUAGE_IMAGES, LANGUAGE_ANSWERS = 2, 4, 8
WORDS, IMAGE, VIDEO, BEGIN, END = 8000, 8001, 8002, 8003, 8004
PARTS = ("language", "trees", "hybrid")
TOWER = {"depth": 1, "hidden_size": 128, "intermediate_size": 512, "num_heads": 4}


def write_vision_step_model(folder: Path, family: str = SEEING) -> Path:
    """Writes a random Qwen3-VL or Qwen3.5. Its language model has the size of `benchmarks.train_step`'s dense model."""
    import torch
    import transformers

    from benchmarks.train_step_ways import SIZES
    from relax_core.tools.tiny_media import write_published

    size = SIZES["dense"]
    text = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.feed_forward,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": 16384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]},
    }
    vision = {
        **TOWER,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": size.hidden,
        "num_position_embeddings": SIDE**2,
        "deepstack_visual_indexes": [0],
        "in_channels": 3,
    }
    name = "Qwen3VL"
    if family == HYBRID:
        name, text = "Qwen3_5", text | _delta_net(size)
        del vision["deepstack_visual_indexes"]
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    folder.mkdir()
    config.save_pretrained(folder)
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"shortest_edge": 64, "longest_edge": 2**20}}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps(settings))
    write_published(model, folder)
    return folder


def _delta_net(size: Size) -> dict[str, Any]:
    """Returns the configuration keys of a Qwen3.5. Its delta nets have the proportions of Qwen3.5-9B."""
    return {
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": size.heads // 2,
        "linear_num_value_heads": size.heads,
        "linear_key_head_dim": size.hidden // size.heads,
        "linear_value_head_dim": size.hidden // size.heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.25,
        },
    }


class VisionSteps:
    """Makes groups with images and computes steps over them. Writes model and media items into ``folder``."""

    def __init__(self, folder: Path, family: str = SEEING) -> None:
        from relax_core.contracts.media_file import FolderReader
        from relax_core.families.folder import folder_architecture

        self.family, self.model = family, write_vision_step_model(folder / "seeing", family)
        self.items = folder / "items"
        self.items.mkdir()
        self.reader = FolderReader(self.items)
        tower = folder_architecture(self.model).vision
        assert tower is not None, "the model sees"
        self.tower = tower
        self._random = np.random.default_rng(3)

    def image(self) -> MediaItem:
        """Returns a new random image."""
        from tests.media_items import item_of

        pixels = self._random.integers(0, 256, (1, SIDE * PATCH, SIDE * PATCH, 3), dtype=np.uint8)
        return item_of(self.tower, pixels, folder=self.items)

    def group(self, uid: str, *, images: int, answers: int) -> TokenTree:
        """Returns a group. Its prompt has new images with text between them."""
        from relax_core.contracts.media import Media
        from tests.trees import answers_tree

        ids: list[int] = []
        media: list[Media] = []
        for _ in range(images):
            item = self.image()
            ids += [*self._random.integers(0, WORDS, BETWEEN).tolist(), BEGIN]
            media.append(Media(item, len(ids), len(ids) + item.rows))
            ids += [*item.ids.tolist(), END]
        lengths = np.full(answers, ANSWER)
        advantages = self._random.standard_normal(answers).astype(np.float32)
        tree = answers_tree(
            uid,
            np.array(ids, dtype=np.int32),
            lengths,
            self._random.integers(0, WORDS, int(lengths.sum()), dtype=np.int32),
            logprobs=-1.0,
            advantages=np.repeat(advantages, lengths),
        )
        return replace(tree, media=media)

    def ours(self) -> Any:
        """Returns the trainer for the groups with images."""
        from benchmarks.train_step_ways import Ours

        return Ours(self.model, family=self.family, media=self.reader)

    def tower_seconds(self, groups: Sequence[TokenTree], module: Any) -> float:
        """Returns the CPU seconds of the tower's passes in a step with one group per micro-batch."""
        import torch

        from relax_core.families.tower_passes import pass_items

        start = time.process_time()
        for group in groups:
            items = [medium.item for medium in group.media]
            frames = [self.reader.tensors(item)["frames"] for item in items]
            output = pass_items(module, self.tower, frames, [item.grid for item in items])
            torch.stack([output.features, *output.deepstack]).sum().backward()
        return time.process_time() - start


def language(folder: Path, *, rounds: int) -> Comparison:
    """Compares a step over images, the tower's passes in it, and a step over the same number of text rows."""
    from benchmarks.train_step_ways import SIZES, Ours, make_groups, write_model

    steps = VisionSteps(folder)
    groups = [
        steps.group(f"g{place}", images=LANGUAGE_IMAGES, answers=LANGUAGE_ANSWERS) for place in range(LANGUAGE_GROUPS)
    ]
    trunk = groups[0].computed_rows - LANGUAGE_ANSWERS * (ANSWER - 1)
    lengths = np.full((LANGUAGE_GROUPS, LANGUAGE_ANSWERS), ANSWER)
    size = SIZES["dense"]
    plain = make_groups(lengths, prompt=trunk, vocabulary=size.vocabulary)
    assert [tree.computed_rows for tree in plain] == [tree.computed_rows for tree in groups]
    seeing, text = steps.ours(), Ours(write_model(folder / "text", size), family="qwen3")
    budget = groups[0].computed_rows
    ways: dict[str, Callable[[], float]] = {
        "text": lambda: seconds_of(lambda: text.step(plain, budget_rows=budget)),
        "pictures": lambda: seconds_of(lambda: seeing.step(groups, budget_rows=budget)),
        "tower": lambda: steps.tower_seconds(groups, seeing.vision),
    }
    title = f"{LANGUAGE_GROUPS} groups of {budget:,} rows, {LANGUAGE_IMAGES} images each"
    found = take_turns(title, {name: partial(_figures, way) for name, way in ways.items()}, rounds=rounds)
    seconds = [[figures["seconds"] for figures in found.found[name]] for name in ("text", "pictures", "tower")]
    ratios = [(pictures - tower) / plain_s for plain_s, pictures, tower in zip(*seconds, strict=True)]
    print(found.table(base="text", ratio_of=["seconds"]))
    print(f"language part over a text step: {median(ratios):.3f}, at most {LANGUAGE_BOUND:.2f} is wanted", flush=True)
    return found


def _figures(way: Callable[[], float], number: int) -> Metrics:
    return {"seconds": way()}


def trees(folder: Path, *, family: str, rounds: int) -> Iterator[Comparison]:
    """Yields for each shape of `TREES` the speed of a step over a group as a tree and as rows."""
    from benchmarks.train_step import measure
    from benchmarks.train_step_ways import as_rows

    steps = VisionSteps(folder, family)
    rows_model, tree_model = steps.ours(), steps.ours()
    for (image_rows, answers), reach in zip(TREES, TREE_REACH[family], strict=True):
        group = steps.group("g0", images=image_rows // IMAGE_ROWS, answers=answers)
        rows = as_rows([group])
        budget = group.computed_rows
        ways: dict[str, Callable[[], float]] = {
            "rows": lambda rows=rows, budget=budget: rows_model.step(rows, budget_rows=budget),  # type: ignore[misc]
            "tree": lambda group=group, budget=budget: tree_model.step([group], budget_rows=budget),  # type: ignore[misc]
        }
        name = f"{family}, {image_rows:,} image rows × {answers} answers, reach {reach:g}"
        yield measure(name, ways, tokens=answers * ANSWER, rounds=rounds)


def seconds_of(step: Callable[[], float]) -> float:
    """Returns the CPU seconds of a step."""
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> int:
    """Runs the parts and prints their results."""
    os.environ |= ONE_THREAD  # set before torch is imported
    from benchmarks.train_step import tell

    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:2])
    given = parser.parse_args()
    print(machine(), flush=True)
    report: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory(prefix="relax-train-step-media-") as scratch:
        for part in given.parts:
            folder = Path(scratch) / part
            folder.mkdir()
            if part == "language":
                report[part] = language(folder, rounds=given.rounds).found
            else:
                report[part] = tell(trees(folder, family=HYBRID if part == "hybrid" else SEEING, rounds=given.rounds))
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
