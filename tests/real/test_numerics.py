"""Compares trainer and embedded engine with transformers on real weights in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.real_numerics import (
    Answer,
    Trainer,
    answers,
    embedded_model,
    gradient_gaps,
    reference_gradients,
    reference_logprobs,
)
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.embedded.decoder_model import LanguageModel
from tests.real.prompts import conversations

pytestmark = pytest.mark.real

PROMPTS, NEW_TOKENS, STOP = 12, 12, (2,)
MAX_GAP, MEAN_GAP = 2e-4, 1e-5  # gaps of log-probs; benchmarks.real_numerics measures 200 prompts


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = PromptTokenizer(smollm2)
    return [tokenizer.encode(conversation) for conversation in conversations(PROMPTS)]


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> LanguageModel:
    return embedded_model(smollm2)


@pytest.fixture(scope="module")
def trainer(smollm2: Path) -> Trainer:
    return Trainer(smollm2)


@pytest.fixture(scope="module")
def sampled(engine: LanguageModel, prompts: list[list[int]]) -> list[Answer]:
    return answers(engine, prompts, temperature=1.0, stop=STOP, new_tokens=NEW_TOKENS)


def test_log_probs_of_sampled_answers(reference: Any, trainer: Trainer, sampled: list[Answer]) -> None:
    exact = reference_logprobs(reference, sampled)
    assert len(exact) > PROMPTS
    of_engine = torch.tensor([value for answer in sampled for value in answer.logprobs])
    for found in (of_engine, trainer.logprobs(sampled)):
        gap = (found - exact).abs()
        assert gap.max() <= MAX_GAP and gap.mean() <= MEAN_GAP


def test_greedy_answers_are_those_of_generate(engine: LanguageModel, reference: Any, prompts: list[list[int]]) -> None:
    for answer in answers(engine, prompts[:8], temperature=0.0, stop=STOP, new_tokens=NEW_TOKENS):
        whole = reference.generate(torch.tensor([answer.prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert list(answer.ids) == whole[0, len(answer.prompt) :].tolist()


def test_the_gradients_of_a_train_step(smollm2: Path, trainer: Trainer, sampled: list[Answer]) -> None:
    few = sampled[:3]
    worst, tensor = gradient_gaps(trainer.gradients(few), reference_gradients(smollm2, few, torch.float32))
    assert worst <= 1e-3, tensor  # relative to the tensor's largest entry; transformers differs by 2.4e-4 from float64
