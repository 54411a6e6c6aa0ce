"""Makes the builtin model that sees and hears, a Qwen3-Omni, in the layout in which Qwen3-Omni is published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_core.config.media_schema import FOUR_MODALITIES, TONE_OF_PICTURE
from relax_core.contracts.trees.rotary import rotary_of_sequence
from relax_core.data.tasks.modality_tasks import MATCH, MODALITY_ANSWERS, MODALITY_PARTS
from relax_core.families.architecture import Architecture
from relax_core.families.folder import folder_architecture
from relax_core.families.tiny_configs import OMNI
from relax_core.families.tiny_omni import tiny_omni_config, tiny_omni_files
from relax_core.families.towers import Towers
from relax_core.tools.tiny_tokenizer import build_tokenizer
from relax_core.tools.tiny_vision import SeenBatch, SeenExamples, write_settings
from relax_core.tools.tiny_warm_start import WARM_STARTS, FurtherWarmStart, SeeWarmStart, padded, supervised_steps

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = {FOUR_MODALITIES: MODALITY_PARTS, TONE_OF_PICTURE: (MATCH,)}
ANSWERS = {task: {part: MODALITY_ANSWERS[part] for part in parts} for task, parts in _PARTS.items()}
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def write_omni_model(folder: Path, *, task: str) -> None:
    """Makes a model that sees and hears; with one torch thread, the result is always the same.

    The warm start trains the thinker. Talker and code2wav keep their random weights. The question of two kinds begins
    with the warm start of each kind alone.
    """
    import torch

    recipe = WARM_STARTS[OMNI, task]
    assert isinstance(recipe, SeeWarmStart)
    torch.manual_seed(recipe.seed)
    build_tokenizer(vision=True, audio=True).save_pretrained(folder)
    config = tiny_omni_config()
    write_settings(folder, config, tiny_omni_files())
    model, architecture = build_omni_model(config), folder_architecture(folder)
    if isinstance(recipe, FurtherWarmStart):
        _train(model.thinker, folder, architecture, recipe.first, task=recipe.first_task)
    _train(model.thinker, folder, architecture, recipe, task=task)
    write_published_omni(model, folder)


def _train(thinker: Any, folder: Path, architecture: Architecture, recipe: SeeWarmStart, *, task: str) -> None:
    """Takes the steps of a warm start on the examples of a task."""
    import torch

    towers = Towers.of(architecture)
    assert towers is not None and architecture.vision is not None
    examples = SeenExamples(folder, architecture.vision, audio=architecture.audio, answers=ANSWERS[task])

    def loss_of_step(step: int) -> Tensor:
        loss, weights = torch.zeros(()), 0.0
        for weight, batch in examples.weighted_batches(recipe, step, task=task):
            logits, tokens = omni_answer_logits(thinker, towers, batch)
            loss = loss + weight * torch.nn.functional.cross_entropy(logits, tokens, reduction="sum")
            weights += weight * len(tokens)
        return loss / weights

    supervised_steps(thinker, recipe, loss_of_step)


def omni_answer_logits(thinker: Any, towers: Towers, batch: SeenBatch) -> tuple[Tensor, Tensor]:
    """Returns the logits of the answers' tokens ``[tokens, vocabulary]`` and the tokens, answer by answer.

    Sounds pass the tower as in trainer and engine, and not in one batch of transformers, which pads their chunks less.
    """
    import torch

    from relax_core.families.tower_passes import inputs_of, pass_towers

    ids, targets = padded(batch.prompts, batch.answers, pad=thinker.config.text_config.pad_token_id)
    positions = [rotary_of_sequence(ids.shape[1], media)[0] for media in batch.media]
    embeds, extra = thinker.model.embed_tokens(ids), dict[str, Any]()
    items = [one.item for media in batch.media for one in media]
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
        if name.endswith((_GATE_UP, _DOWN)):  # transformers 5 leaves what was in the memory
            torch.nn.init.normal_(weight, std=0.02)
    return model


def write_published_omni(model: Any, folder: Path) -> None:
    """Writes the weights of thinker, talker and code2wav as published."""
    from safetensors.torch import save_file

    weights = {name: weight.contiguous() for name, weight in published_omni(model.state_dict().items())}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def published_omni(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors under their published names: a layer's experts are apart, which transformers fuses in memory."""
    for name, tensor in tensors:
        if name.endswith(_GATE_UP):
            experts = f"{name.removesuffix(_GATE_UP)}.experts."
            for number, (gate, up) in enumerate(one.chunk(2) for one in tensor):
                yield f"{experts}{number}.gate_proj.weight", gate
                yield f"{experts}{number}.up_proj.weight", up
        elif name.endswith(_DOWN):
            experts = f"{name.removesuffix(_DOWN)}.experts."
            for number, down in enumerate(tensor):
                yield f"{experts}{number}.down_proj.weight", down
        else:
            yield name, tensor
