"""Tests that the builtin vision and audio model loads in transformers and initially gives each answer a probability.

The complete warm start takes a minute of processor time, so `make test` runs only two steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from relax_core.data.generated import example
from relax_core.families.folder import folder_architecture
from relax_core.families.towers import Towers
from relax_core.tools.make_tiny import make_tiny_model, tiny_model_folder
from relax_core.tools.tiny_media import OMNI_ANSWERS, MediaBatch, MediaExamples, omni_answer_logits, published_omni
from relax_core.tools.tiny_text import WARM_STARTS, VisionWarmStart

NAME, TASK = "tiny_qwen3_omni", "four_modalities"


def _loaded(folder: Path) -> Any:
    from transformers import Qwen3OmniMoeForConditionalGeneration

    torch.set_num_threads(1)
    loaded: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    found, info = loaded
    assert not any(info.values())
    return found


def test_transformers_loads_the_published_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = WARM_STARTS[NAME, TASK]
    assert isinstance(recipe, VisionWarmStart)
    monkeypatch.setitem(WARM_STARTS, (NAME, TASK), replace(recipe, steps=2, right_steps=1))
    make_tiny_model(tmp_path, task=TASK, name=NAME)
    model, folder = _loaded(tmp_path), tmp_path
    theirs, weights = dict(published_omni(model.state_dict().items())), load_file(folder / "model.safetensors")
    assert theirs.keys() == weights.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in weights.items())
    assert {name.split(".")[0] for name in weights} == {"thinker", "talker", "code2wav"}


@pytest.mark.soak
def test_it_starts_with_a_chance_of_every_answer() -> None:
    """Checks greedy answers to held-out rows (0.25 are right by chance), and the probability of each right answer."""
    folder = tiny_model_folder(NAME, task=TASK)
    model, architecture = _loaded(folder), folder_architecture(folder)
    towers = Towers.of(architecture)
    assert towers is not None and architecture.vision is not None
    examples, batch = (
        MediaExamples(folder, architecture.vision, audio=architecture.audio, answers=OMNI_ANSWERS[TASK]),
        MediaBatch(),
    )
    rows = [example(TASK, split="eval", seed=0, index=index) for index in range(128)]
    for row in rows:
        examples.add(batch, row, answer=row.answer)
    with torch.no_grad():
        logits, tokens = omni_answer_logits(model.thinker, towers, batch)
    sizes = [len(answer) for answer in batch.answers]
    right = (logits.argmax(-1) == tokens).split(sizes)
    assert 0.25 < sum(bool(is_right.all()) for is_right in right) / len(right) <= 0.65
    chances = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].split(sizes)
    by_answer: dict[str, list[float]] = {}
    for row, logprobs in zip(rows, chances, strict=True):
        by_answer.setdefault(row.answer, []).append(float(logprobs.sum().exp()))
    assert len(by_answer) == 16
    assert min(sum(found) / len(found) for found in by_answer.values()) > 0.15  # 16 samples lack it 1 time in 13
