"""Trainer and embedded engine against transformers on real weights in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.families import logprobs_of, trainer_gaps
from relax_core.contracts.tree import TokenTree
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.embedded.decoder import Decoder, Prefix
from relax_core.engines.embedded.decoder_model import LanguageModel
from relax_core.engines.embedded.fused_weights import FusedWeights
from relax_core.engines.embedded.model_config import read_model_config
from relax_core.engines.embedded.token_sampler import SamplingSettings, sample_keys
from relax_core.weights.folder_stream import read_safetensors
from tests.real.prompts import conversations
from tests.trees import answers_tree

pytestmark = pytest.mark.real

PROMPTS, NEW_TOKENS, CONTEXT = 12, 12, 128
MAX_GAP, MEAN_GAP = 2e-4, 1e-5  # log-probs; the targets for 200 prompts, which benchmarks.real_model measures


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = PromptTokenizer(smollm2)
    return [tokenizer.encode(conversation) for conversation in conversations(PROMPTS)]


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> LanguageModel:
    config = read_model_config(smollm2)
    weights = FusedWeights(config, torch.float32)
    weights.apply(weights.checked(read_safetensors(smollm2)))
    return LanguageModel(config, weights, context_length=CONTEXT)


@torch.inference_mode()
def answers(engine: LanguageModel, prompts: list[list[int]], *, temperature: float) -> list[tuple[list[int], Any]]:
    """Token ids and log-probs of one answer to each prompt."""
    decoder = Decoder(
        engine, dtype=torch.float32, max_samples=len(prompts), max_tokens=len(prompts) * CONTEXT, context_length=CONTEXT
    )
    settings = SamplingSettings(
        max_new_tokens=NEW_TOKENS,
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        stop_token_ids=(2,),
        banned_token_ids=(),
    )
    done = decoder.admit(
        [
            Prefix(token_ids=prompt, settings=settings, keys=sample_keys([index], 1)[0])
            for index, prompt in enumerate(prompts)
        ]
    )
    ended, running = {}, list(range(len(prompts)))  # the prompt of each slot
    while running:
        ended |= {running[slot]: decoder.slots.output(slot) for slot in map(int, done)}
        last = len(running) - len(done)
        for source, target in decoder.remove([int(slot) for slot in done]):
            running[target] = running[source]
        del running[last:]
        done = decoder.step() if running else done
    return [ended[index] for index in range(len(prompts))]


@pytest.fixture(scope="module")
def sampled(engine: LanguageModel, prompts: list[list[int]]) -> list[tuple[list[int], Any]]:
    return answers(engine, prompts, temperature=1.0)


@torch.inference_mode()
def test_log_probs_of_sampled_answers(
    reference: Any, prompts: list[list[int]], sampled: list[tuple[list[int], Any]]
) -> None:
    gaps = [
        logprobs_of(reference, [*prompt, *ids])[-len(ids) :] - torch.tensor(logprobs)
        for prompt, (ids, logprobs) in zip(prompts, sampled, strict=True)
    ]
    gap = torch.cat(gaps).abs()
    assert len(gap) > PROMPTS
    assert gap.max() <= MAX_GAP and gap.mean() <= MEAN_GAP


def test_greedy_answers_are_those_of_generate(engine: LanguageModel, reference: Any, prompts: list[list[int]]) -> None:
    for prompt, (ids, _) in zip(prompts, answers(engine, prompts, temperature=0.0), strict=True):
        whole = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert list(ids) == whole[0, len(prompt) :].tolist()


def test_a_train_steps_log_probs_and_gradients(
    smollm2: Path, reference: Any, prompts: list[list[int]], sampled: list[tuple[list[int], Any]]
) -> None:
    random = np.random.default_rng(0)
    groups: list[TokenTree] = [
        answers_tree(
            f"g{index}",
            np.array(prompt, dtype=np.int32),
            [len(ids)],
            np.array(ids, dtype=np.int32),
            advantages=random.standard_normal(len(ids)).astype(np.float32),
        )
        for index, (prompt, (ids, _)) in enumerate(zip(prompts[:4], sampled, strict=False))
    ]
    # SmolLM2's pad token is <|im_end|>, which is in every prompt. transformers leaves the inputs out of the gradient of
    # its embedding, as of a pad token's; Relax has no pad tokens.
    reference.get_input_embeddings().padding_idx = None
    gaps = trainer_gaps(smollm2, reference, groups=groups)
    assert gaps["trainer"] <= MAX_GAP
    assert gaps["gradients"] <= 1e-3  # of each tensor's largest entry
