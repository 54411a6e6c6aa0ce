"""Makes the builtin models that see, with their processor files and a warm start: Qwen3-VL, Qwen3.5, with experts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_core.contracts.media import Media, MediaSource
from relax_core.contracts.trees.rotary import rotary_of_sequence
from relax_core.data.generated import Example, example
from relax_core.data.media.item_encoder import Encoded, encode_item
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.tasks.see_task import ANSWERS, WORD
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.families.architecture import AudioSettings, VisionTower
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import CONFIG_FILE
from relax_core.families.tiny_configs import processor_files, tiny_config, token_ids
from relax_core.tools.tiny_tokenizer import build_tokenizer
from relax_core.tools.tiny_warm_start import WARM_STARTS, SeeWarmStart, padded, supervised_steps

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_CHUNK_ROWS = 16  # of the gated delta rule; at the size of the builtin models, 64 take twice the time


def write_vision_model(folder: Path, *, name: str, task: str) -> None:
    """Makes a model that sees and writes it in the layout in which its family is published.

    With one torch thread, the result is always the same.
    """
    import torch

    recipe = WARM_STARTS[name, task]
    assert isinstance(recipe, SeeWarmStart)
    torch.manual_seed(recipe.seed)
    build_tokenizer(vision=True).save_pretrained(folder)
    config = tiny_config(name)
    write_settings(folder, config)
    tower = folder_architecture(folder).vision
    assert tower is not None, "the family has a tower"
    model = build_vision_model(config)
    examples = SeenExamples(folder, tower)

    def loss_of_step(step: int) -> Tensor:
        loss, weights = torch.zeros(()), 0.0
        for weight, batch in examples.weighted_batches(recipe, step, task=task):
            logits, tokens = answer_logits(model, tower, batch)
            loss = loss + weight * torch.nn.functional.cross_entropy(logits, tokens, reduction="sum")
            weights += weight * len(tokens)
        return loss / weights

    with _short_chunks(model):
        supervised_steps(model, recipe, loss_of_step)
    write_published(model, folder)


@contextmanager
def _short_chunks(model: PreTrainedModel) -> Iterator[None]:
    """Lets transformers compute the gated delta rule, if the model has one, in chunks of fewer rows."""
    module, name = sys.modules[type(model).__module__], "torch_chunk_gated_delta_rule"
    rule = getattr(module, name, None)
    if rule is None:
        yield
        return
    setattr(module, name, partial(rule, chunk_size=_CHUNK_ROWS))
    try:
        yield
    finally:
        setattr(module, name, rule)


def write_published(model: PreTrainedModel, folder: Path) -> None:
    """Writes the weights of a model that sees as its family is published.

    Qwen3-VL-MoE's experts are transposed, which transformers' own save_pretrained leaves out for a model that it has
    not loaded. A Qwen3.5 has the tensors of a layer that predicts one token more (MTP), which transformers ignores.
    """
    from safetensors.torch import save_file

    tied, kind = model.config.tie_word_embeddings, model.config.model_type
    weights = {
        name: weight.transpose(1, 2) if ".mlp.experts." in name and kind == "qwen3_vl_moe" else weight
        for name, weight in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    if kind in ("qwen3_5", "qwen3_5_moe"):
        weights |= _further_token_layer(model)
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def _further_token_layer(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns random tensors under the names of Qwen3.5's MTP layer: a layer with attention, and what feeds it."""
    import torch

    layers = model.model.language_model.layers
    layer = {f"mtp.layers.0.{name}": torch.randn_like(one) for name, one in layers[-1].state_dict().items()}
    hidden = model.config.text_config.hidden_size
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return (
        layer
        | {"mtp.fc.weight": torch.randn(hidden, 2 * hidden)}
        | {f"mtp.{name}.weight": torch.randn(hidden) for name in norms}
    )


def write_settings(folder: Path, config: dict[str, Any], files: Mapping[str, Any] | None = None) -> None:
    """Writes the configuration of a model that sees, and its processor files, those of Qwen3-VL by default."""
    for name, values in {CONFIG_FILE: config, **(processor_files() if files is None else files)}.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def build_vision_model(config: dict[str, Any]) -> PreTrainedModel:
    """Returns transformers' model of a configuration as published, with random weights."""
    import transformers

    model_class = getattr(transformers, config["architectures"][0])
    model: PreTrainedModel = model_class(model_class.config_class.from_dict(config))
    return model


@dataclass(frozen=True, slots=True)
class SeenBatch:
    """Holds examples of the task: ids of prompts and answers, where items stand, their tensors and frames by kind."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    media: list[list[Media]] = field(default_factory=list)
    tensors: list[Mapping[str, np.ndarray]] = field(default_factory=list)
    frames: dict[str, list[tuple[np.ndarray, list[int]]]] = field(default_factory=lambda: {"image": [], "video": []})


class SeenExamples:
    """Makes ids and tensors of a task's examples; each item is encoded once.

    ``answers`` are those of each part of the task, and ``audio`` is given to a model that hears.
    """

    def __init__(
        self,
        folder: Path,
        tower: VisionTower,
        *,
        audio: AudioSettings | None = None,
        answers: Mapping[str, tuple[str, ...]] = ANSWERS,
    ) -> None:
        self._tokenizer, self._tower, self._audio = PromptTokenizer(folder), tower, audio
        self._answers = answers
        self._encoded: dict[str, Encoded] = {}

    def weighted_batches(self, recipe: SeeWarmStart, step: int, *, task: str) -> list[tuple[float, SeenBatch]]:
        """Returns the answers that a step of the warm start learns, by their part, each batch with its weight.

        The parts stand apart because a video has more rows than all else, to which others would be padded.
        """
        found: list[tuple[float, SeenBatch]] = []
        for number, part in enumerate(self._answers):
            examples = [
                example(task, split="train", seed=recipe.seed, index=index)
                for index in range(step * recipe.batch_size, (step + 1) * recipe.batch_size)
                if index % len(self._answers) == number
            ]
            assert all(one.part == part for one in examples), "the parts take turns"
            guessed = 0.0 if part == WORD or step < recipe.right_steps else recipe.guessed
            for weight, first in ((1 - guessed, False), (guessed, True)):
                batch = SeenBatch()
                for one in examples:
                    self.add(batch, one, answer=self._answers[part][0] if first else one.answer)
                found += [(weight, batch)] if weight else []
        return found

    def add(self, batch: SeenBatch, one: Example, *, answer: str) -> None:
        """Adds an example with this answer to a batch."""
        shown = [self._item(source) for source in one.sources]
        content = [*({"type": item.kind} for item, _ in shown), {"type": "text", "text": one.prompt}]
        ids = self._tokenizer.encode([{"role": "user", "content": content}])
        prompt, media = self._tokenizer.place_items(ids, [item for item, _ in shown])
        batch.prompts.append(prompt)
        batch.answers.append([*self._tokenizer.encode_plain(answer), *self._tokenizer.stop_token_ids])
        batch.media.append(media)
        for item, tensors in shown:
            batch.tensors.append(tensors)
            if "frames" in tensors:
                batch.frames[item.kind].append((tensors["frames"], item.grid))

    def _item(self, source: MediaSource) -> Encoded:
        assert source.path is not None, "the task has files"
        if source.path not in self._encoded:
            root, tokenize = Path(source.path).parent, self._tokenizer.encode_plain
            found = encode_item(source, self._tower, MediaLimits(), root=root, tokenize=tokenize, audio=self._audio)
            self._encoded[source.path] = found
        return self._encoded[source.path]


def answer_logits(model: Any, tower: VisionTower, batch: SeenBatch) -> tuple[Tensor, Tensor]:
    """Returns the logits of the answers' tokens ``[tokens, vocabulary]`` and the tokens, answer by answer."""
    import torch

    ids, targets = padded(batch.prompts, batch.answers, pad=token_ids(vision=True)["<pad>"])
    positions = [rotary_of_sequence(ids.shape[1], media)[0] for media in batch.media]
    hidden = model.model(
        input_ids=ids, position_ids=torch.from_numpy(np.stack(positions, axis=1)), **_tower_inputs(tower, batch)
    ).last_hidden_state
    rows = targets >= 0
    return model.lm_head(hidden[rows]), targets[rows]


def _tower_inputs(tower: VisionTower, batch: SeenBatch) -> dict[str, Tensor]:
    """Returns patches and grids under the names that transformers gives them."""
    import torch

    from relax_core.families.vision.patches import patches_of

    names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
    found: dict[str, Tensor] = {}
    for kind, shown in batch.frames.items():
        if shown:
            pixels, grids = names[kind]
            found[pixels] = torch.cat([patches_of(frames, tower) for frames, _ in shown])
            found[grids] = torch.tensor([grid for _, grid in shown])
    return found
