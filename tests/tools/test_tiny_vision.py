"""Tests that the builtin models that see load in transformers, and start where GRPO has something to climb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from relax_core.data.generated import example
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.families.folder import folder_architecture
from relax_core.families.tiny_configs import VISION_NAMES, token_ids
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.tools.tiny_vision import SeenBatch, SeenExamples, answer_logits


@pytest.fixture(params=VISION_NAMES)
def folder(request: pytest.FixtureRequest) -> Path:
    return tiny_model_folder(request.param, task="see")


def test_transformers_loads_the_published_layout(folder: Path) -> None:
    from transformers import AutoModelForImageTextToText

    loaded: Any = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not any(info.values())
    theirs, weights = model.state_dict(), load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        assert theirs[name].equal(tensor.mT if ".mlp.experts." in name else tensor), name
    assert ("lm_head.weight" in weights) is (not folder_architecture(folder).tie_word_embeddings)


def test_the_tokenizer_knows_time_stamps_and_keeps_names_of_special_tokens_as_text(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder)
    ids = token_ids(vision=True)
    stamp = "<0.2 seconds>"
    assert tokenizer.encode_plain(stamp) == [ids[character] for character in stamp]
    name = "<|image_pad|>"
    assert tokenizer.encode_plain(name) == [ids[character] for character in name]
    parts = [{"type": "image"}, {"type": "text", "text": name}]
    rendered = tokenizer.encode([{"role": "user", "content": parts}])
    assert rendered.count(ids[name]) == 1


def test_it_starts_with_a_chance_of_every_answer(folder: Path) -> None:
    """Greedy answers to held-out rows, of which 0.25 are right by chance, and the probability of each right answer."""
    import torch
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(1)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    tower = folder_architecture(folder).vision
    assert tower is not None
    examples, batch = SeenExamples(folder, tower), SeenBatch()
    rows = [example("see", split="eval", seed=0, index=index) for index in range(96)]
    for one in rows:
        examples.add(batch, one, answer=one.answer)
    with torch.no_grad():
        logits, tokens = answer_logits(model, tower, batch)
    right = (logits.argmax(-1) == tokens).split([len(answer) for answer in batch.answers])
    assert 0.25 < sum(bool(each.all()) for each in right) / len(right) <= 0.65
    chances = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].split([len(one) for one in batch.answers])
    by_answer: dict[str, list[float]] = {}
    for one, each in zip(rows, chances, strict=True):
        by_answer.setdefault(one.answer, []).append(float(each.sum().exp()))
    assert len(by_answer) == 12
    assert min(sum(found) / len(found) for found in by_answer.values()) > 0.15  # 16 samples lack it 1 time in 13
