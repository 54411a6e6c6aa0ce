"""Tests that transformers and the embedded engine compute the same log-probs from a folder exported after a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_trainer import export_folder, make_backend, train_step

from benchmarks.parity_data import with_rollout
from benchmarks.parity_omni import OMNI, OmniItems, make_omni_case, make_omni_model, omni_logits
from relax_core.contracts.media import Media
from relax_core.contracts.media_file import FolderReader
from relax_core.engines.embedded.decoder import Decoder, ScoreItem
from relax_core.engines.embedded.decoder_model import LanguageModel
from relax_core.engines.embedded.fused_weights import FusedWeights
from relax_core.engines.embedded.model_config import read_model_config
from relax_core.engines.embedded.tower_features import MediaFeatures
from relax_core.families.towers import Towers
from relax_core.weights.folder_stream import read_safetensors
from tests.engines.embedded.model.test_omni_prompts import prompt
from tests.trees import answers_tree
from tests.vision_models import Seen, make_tiny_vision_model, text

TOLERANCE = 2e-5
MOVED = 1e-3  # a step moves log-probs by at least this much
CONTEXT = 700
Prompt = tuple[list[int], list[Media]]


def embedded_logprobs(folder: Path, reader: FolderReader, prompts: Sequence[Prompt]) -> torch.Tensor:
    """Returns the embedded engine's log-probs of all prompt tokens after the first token."""
    config = read_model_config(folder)
    towers = Towers.of(config)
    assert towers is not None
    weights = FusedWeights(config, torch.float32)
    weights.apply(weights.checked(read_safetensors(folder)))
    decoder = Decoder(
        LanguageModel(config, weights, context_length=CONTEXT),
        dtype=torch.float32,
        max_samples=8,
        max_tokens=8 * CONTEXT,
        context_length=CONTEXT,
        features=MediaFeatures(towers, reader, vision=weights.vision, audio=weights.audio),
    )
    items = [ScoreItem(token_ids=ids, start=0, top_k=1, temperature=1.0, media=media) for ids, media in prompts]
    with torch.inference_mode():
        return torch.cat([torch.tensor(scores.logprobs) for scores in decoder.score(items)])


def test_an_export_of_omni(tmp_path: Path) -> None:
    """Compares log-probs of three prompts: all media kinds, a video with audio, and text."""
    source, media = tmp_path / "model", tmp_path / "media"
    make_omni_model(source)
    items, reader = OmniItems(source, media), FolderReader(media)
    backend = make_backend(source, family=OMNI, media=reader)
    groups = make_omni_case("four kinds", items)
    train_step(backend, [with_rollout(groups, backend.logprobs(groups))])
    folder = tmp_path / "hf"
    export_folder(backend, source, folder)
    prompts = [
        prompt(7, items.image(4, 6), 3, items.clip(730), 2, items.video(3, 4, 4), 5),
        prompt(2, items.video_with_sound(3, 2, 4, frames=250), 6),
        prompt(9),
    ]
    model = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder).thinker.eval()
    towers = Towers.of(read_model_config(folder))
    assert towers is not None
    expected = []
    for ids, shown in prompts:
        tree: Any = SimpleNamespace(token_ids=np.array(ids), media=shown)
        with torch.no_grad():
            table = omni_logits(model, tree, reader, towers)[:-1].log_softmax(-1)
        expected.append(table.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0])
    assert_agree(folder, source, reader, prompts, torch.cat(expected))


@pytest.mark.parametrize("name", ["tiny_qwen3_5", "tiny_qwen3_5_moe"])
def test_an_export_of_layers_with_states(tmp_path: Path, name: str) -> None:
    source, media = tmp_path / "model", tmp_path / "media"
    make_tiny_vision_model(source, name=name)
    seen, reader = Seen(source, media), FolderReader(media)
    ids, shown = seen.prompt(text(5), seen.image(2, 3), text(4))
    advantages = torch.randn(12, generator=torch.Generator().manual_seed(0)).numpy()
    group = answers_tree("g", ids, [5, 7], text(12), logprobs=-1.0, advantages=advantages)
    backend = make_backend(source, family=name.removeprefix("tiny_"), media=reader)
    train_step(backend, [[replace(group, media=shown)]])
    folder = tmp_path / "hf"
    export_folder(backend, source, folder)
    prompts = [seen.prompt(text(70), seen.image(6, 7, seed=1), text(9), seen.video(3, 4, 3, seed=2)), (text(131), [])]
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    expected = torch.cat([seen.logprobs(model, *asked) for asked in prompts])
    assert_agree(folder, source, reader, prompts, expected)


def assert_agree(
    folder: Path, source: Path, reader: FolderReader, prompts: Sequence[Prompt], expected: torch.Tensor
) -> None:
    found = embedded_logprobs(folder, reader, prompts)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    assert (found - embedded_logprobs(source, reader, prompts)).abs().max() > MOVED
