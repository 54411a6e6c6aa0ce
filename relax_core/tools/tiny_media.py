"""Makes the builtin vision models and the model with vision and audio, with processor files and a warm start.

The vision models are a Qwen3-VL and a Qwen3.5, with and without experts. The model with vision and audio is a
Qwen3-Omni. The files have the published layout of each family.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_core.config.schema import FOUR_MODALITIES, TONE_OF_PICTURE
from relax_core.contracts.media import Media, MediaSource
from relax_core.contracts.rotary import rotary_of_sequence
from relax_core.data.generated import Example, example
from relax_core.data.media.item_encoder import Encoded, encode_item
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media_tasks import ANSWERS, MATCH, MODALITY_ANSWERS, MODALITY_PARTS, WORD
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.families.architecture import Architecture, AudioSettings, VisionTower
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import CONFIG_FILE
from relax_core.families.tiny_configs import (
    OMNI,
    processor_files,
    tiny_config,
    tiny_omni_config,
    tiny_omni_files,
    token_ids,
)
from relax_core.families.towers import Towers
from relax_core.tools.tiny_text import (
    WARM_STARTS,
    FurtherWarmStart,
    VisionWarmStart,
    build_tokenizer,
    padded,
    supervised_steps,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


_CHUNK_ROWS = 16  # rows per chunk of the gated delta rule; for tiny models, chunks of 64 rows take twice the time


def write_vision_model(folder: Path, *, name: str, task: str) -> None:
    """Makes a vision model and writes it in the published layout of its model family.

    With one torch thread, the result is reproducible.
    """
    import torch

    recipe = WARM_STARTS[name, task]
    assert isinstance(recipe, VisionWarmStart)
    torch.manual_seed(recipe.seed)
    build_tokenizer(vision=True).save_pretrained(folder)
    config = tiny_config(name)
    write_settings(folder, config)
    tower = folder_architecture(folder).vision
    assert tower is not None, "the family has a tower"
    model = build_vision_model(config)
    examples = MediaExamples(folder, tower)

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
    """Makes transformers compute a gated delta rule in smaller chunks. No effect for models without an audio tower."""
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
    """Writes the weights of a vision model in the published layout of its family.

    The experts of Qwen3-VL-MoE are stored transposed, but transformers' save_pretrained transposes them only if the
    model was loaded from files. A published Qwen3.5 also has a layer that predicts one more token (MTP). transformers
    ignores this layer.
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
    """Returns random tensors with the names of Qwen3.5's MTP layer: an attention layer and its input layers."""
    import torch

    layers = model.model.language_model.layers
    layer = {f"mtp.layers.0.{name}": torch.randn_like(tensor) for name, tensor in layers[-1].state_dict().items()}
    hidden = model.config.text_config.hidden_size
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return (
        layer
        | {"mtp.fc.weight": torch.randn(hidden, 2 * hidden)}
        | {f"mtp.{name}.weight": torch.randn(hidden) for name in norms}
    )


def write_settings(folder: Path, config: dict[str, Any], files: Mapping[str, Any] | None = None) -> None:
    """Writes the configuration and the processor files of a vision model. The default is Qwen3-VL's processor."""
    for name, values in {CONFIG_FILE: config, **(processor_files() if files is None else files)}.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def build_vision_model(config: dict[str, Any]) -> PreTrainedModel:
    """Returns transformers' model for a published configuration, with random weights."""
    import transformers

    model_class = getattr(transformers, config["architectures"][0])
    model: PreTrainedModel = model_class(model_class.config_class.from_dict(config))
    return model


@dataclass(frozen=True, slots=True)
class MediaBatch:
    """Holds a batch of examples of the task.

    ``prompts`` and ``answers`` are token ids, ``media`` positions of media items, and ``tensors`` the items' tensors.
    ``frames`` has the pixels and grids of images and videos.
    """

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    media: list[list[Media]] = field(default_factory=list)
    tensors: list[Mapping[str, np.ndarray]] = field(default_factory=list)
    frames: dict[str, list[tuple[np.ndarray, list[int]]]] = field(default_factory=lambda: {"image": [], "video": []})


class MediaExamples:
    """Makes token ids and tensors of a task's examples. Each media item is encoded once.

    ``answers`` has the possible answers of each part of the task. ``audio`` are the audio settings of a model with
    audio.
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

    def weighted_batches(self, recipe: VisionWarmStart, step: int, *, task: str) -> list[tuple[float, MediaBatch]]:
        """Returns the batches of one warm-start step with their weights.

        Each part of the task has a batch with right answers, and in later steps also a batch with its first answer.

        Parts have separate batches. In one batch, all items would be padded to the size of a video, the largest kind.
        """
        found: list[tuple[float, MediaBatch]] = []
        for number, part in enumerate(self._answers):
            examples = [
                example(task, split="train", seed=recipe.seed, index=index)
                for index in range(step * recipe.batch_size, (step + 1) * recipe.batch_size)
                if index % len(self._answers) == number
            ]
            assert all(seen_example.part == part for seen_example in examples), "the parts take turns"
            guessed = 0.0 if part == WORD or step < recipe.right_steps else recipe.guessed
            for weight, first in ((1 - guessed, False), (guessed, True)):
                batch = MediaBatch()
                for seen_example in examples:
                    self.add(batch, seen_example, answer=self._answers[part][0] if first else seen_example.answer)
                found += [(weight, batch)] if weight else []
        return found

    def add(self, batch: MediaBatch, seen_example: Example, *, answer: str) -> None:
        """Adds an example with the given answer to a batch."""
        shown = [self._item(source) for source in seen_example.sources]
        content = [*({"type": item.kind} for item, _ in shown), {"type": "text", "text": seen_example.prompt}]
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


def answer_logits(model: Any, tower: VisionTower, batch: MediaBatch) -> tuple[Tensor, Tensor]:
    """Returns the logits ``[tokens, vocabulary]`` and the ids ``[tokens]`` of the answers' tokens, answer by answer."""
    import torch

    ids, targets = padded(batch.prompts, batch.answers, pad=token_ids(vision=True)["<pad>"])
    positions = [rotary_of_sequence(ids.shape[1], media)[0] for media in batch.media]
    hidden = model.model(
        input_ids=ids, position_ids=torch.from_numpy(np.stack(positions, axis=1)), **_tower_inputs(tower, batch)
    ).last_hidden_state
    rows = targets >= 0
    return model.lm_head(hidden[rows]), targets[rows]


def _tower_inputs(tower: VisionTower, batch: MediaBatch) -> dict[str, Tensor]:
    """Returns patches and grids as arguments with transformers' names."""
    import torch

    from relax_core.families.tower_passes import patches_of

    names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
    found: dict[str, Tensor] = {}
    for kind, shown in batch.frames.items():
        if shown:
            pixels, grids = names[kind]
            found[pixels] = torch.cat([patches_of(frames, tower) for frames, _ in shown])
            found[grids] = torch.tensor([grid for _, grid in shown])
    return found


_PARTS = {FOUR_MODALITIES: MODALITY_PARTS, TONE_OF_PICTURE: (MATCH,)}
OMNI_ANSWERS = {task: {part: MODALITY_ANSWERS[part] for part in parts} for task, parts in _PARTS.items()}
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def write_omni_model(folder: Path, *, task: str) -> None:
    """Makes a model with vision and audio. With one torch thread, the result is reproducible.

    The warm start trains only the thinker. Talker and code2wav keep random weights. For the task with questions about
    two kinds of media, the warm start begins with each kind alone.
    """
    import torch

    recipe = WARM_STARTS[OMNI, task]
    assert isinstance(recipe, VisionWarmStart)
    torch.manual_seed(recipe.seed)
    build_tokenizer(vision=True, audio=True).save_pretrained(folder)
    config = tiny_omni_config()
    write_settings(folder, config, tiny_omni_files())
    model, architecture = build_omni_model(config), folder_architecture(folder)
    if isinstance(recipe, FurtherWarmStart):
        _train(model.thinker, folder, architecture, recipe.first, task=recipe.first_task)
    _train(model.thinker, folder, architecture, recipe, task=task)
    write_published_omni(model, folder)


def _train(thinker: Any, folder: Path, architecture: Architecture, recipe: VisionWarmStart, *, task: str) -> None:
    """Runs the steps of a warm start on the examples of a task."""
    import torch

    towers = Towers.of(architecture)
    assert towers is not None and architecture.vision is not None
    examples = MediaExamples(folder, architecture.vision, audio=architecture.audio, answers=OMNI_ANSWERS[task])

    def loss_of_step(step: int) -> Tensor:
        loss, weights = torch.zeros(()), 0.0
        for weight, batch in examples.weighted_batches(recipe, step, task=task):
            logits, tokens = omni_answer_logits(thinker, towers, batch)
            loss = loss + weight * torch.nn.functional.cross_entropy(logits, tokens, reduction="sum")
            weights += weight * len(tokens)
        return loss / weights

    supervised_steps(thinker, recipe, loss_of_step)


def omni_answer_logits(thinker: Any, towers: Towers, batch: MediaBatch) -> tuple[Tensor, Tensor]:
    """Returns the logits ``[tokens, vocabulary]`` and the ids ``[tokens]`` of the answers' tokens, answer by answer.

    Sounds pass the audio tower as in trainer and engine. A batch of transformers would pad the chunks differently.
    """
    import torch

    from relax_core.families.tower_passes import inputs_of, pass_towers

    ids, targets = padded(batch.prompts, batch.answers, pad=thinker.config.text_config.pad_token_id)
    positions = [rotary_of_sequence(ids.shape[1], media)[0] for media in batch.media]
    embeds, extra = thinker.model.embed_tokens(ids), dict[str, Any]()
    items = [medium.item for media in batch.media for medium in media]
    if items:
        inputs = inputs_of(items, batch.tensors)
        outputs = pass_towers(inputs, towers, vision=thinker.visual, audio=thinker.audio_tower)
        if (order := towers.order(items)) is not None:
            outputs = outputs[:, torch.from_numpy(order)]
        rows = torch.from_numpy(towers.feature_rows(ids.flatten().numpy()))
        embeds = embeds.flatten(0, 1).index_copy(0, rows.nonzero()[:, 0], outputs[0]).view_as(embeds)
        extra = {"visual_pos_masks": rows.view_as(ids), "deepstack_visual_embeds": list(outputs[1:])}
    hidden = thinker.model(
        inputs_embeds=embeds, position_ids=torch.from_numpy(np.stack(positions, axis=1)), **extra
    ).last_hidden_state
    chosen = targets >= 0
    return thinker.lm_head(hidden[chosen]), targets[chosen]


def build_omni_model(config: dict[str, Any]) -> Any:
    """Returns transformers' model of a config.json as published, with random weights: thinker, talker and code2wav."""
    import torch
    from transformers import Qwen3OmniMoeForConditionalGeneration

    model_class = Qwen3OmniMoeForConditionalGeneration
    model = model_class(model_class.config_class.from_dict(config))
    for name, weight in model.talker.named_parameters():
        if name.endswith((_GATE_UP, _DOWN)):  # transformers 5 does not initialise them
            torch.nn.init.normal_(weight, std=0.02)
    return model


def write_published_omni(model: Any, folder: Path) -> None:
    """Writes the weights of thinker, talker and code2wav as published."""
    from safetensors.torch import save_file

    weights = {name: weight.contiguous() for name, weight in published_omni(model.state_dict().items())}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def published_omni(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors with their published names. Splits the experts, because transformers fuses experts in memory."""
    for name, tensor in tensors:
        if name.endswith(_GATE_UP):
            experts = f"{name.removesuffix(_GATE_UP)}.experts."
            for number, (gate, up) in enumerate(half.chunk(2) for half in tensor):
                yield f"{experts}{number}.gate_proj.weight", gate
                yield f"{experts}{number}.up_proj.weight", up
        elif name.endswith(_DOWN):
            experts = f"{name.removesuffix(_DOWN)}.experts."
            for number, down in enumerate(tensor):
                yield f"{experts}{number}.down_proj.weight", down
        else:
            yield name, tensor
