"""Compares tokens with transformers, and their log-probs under the sampled distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from relax_core.contracts.engine import Generated, SamplingParams
from tests.contracts.engine.harness import EOS, VOCAB, Engine, make_model, prompts_of, random_prompt

TOLERANCE = 2e-5
PROMPTS = [random_prompt(length, seed=length) for length in (1, 5, 16, 33, 200)]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(None, seed=0)


def transformers_logprobs(model: Any, prompt: list[int], generated: Generated, params: SamplingParams) -> torch.Tensor:
    """Returns the log-prob of each generated token from one uncached forward pass and transformers' warpers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + generated.output_ids.tolist()])).logits[0, len(prompt) - 1 : -1]
    logits[:, params.banned_token_ids] = float("-inf")
    warpers: list[Any] = []
    if params.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits.log_softmax(-1).gather(-1, torch.tensor(generated.output_ids.tolist())[:, None])[:, 0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=4, max_new_tokens=12),
        SamplingParams(n=4, max_new_tokens=12, temperature=0.7),
        SamplingParams(n=4, max_new_tokens=12, temperature=0.7, top_p=0.8),
        SamplingParams(n=4, max_new_tokens=12, top_k=5),
        SamplingParams(n=4, max_new_tokens=12, temperature=1.3, top_k=8, top_p=0.9),
        SamplingParams(n=4, max_new_tokens=12, banned_token_ids=[EOS, 7, 8, 9]),
        SamplingParams(n=1, max_new_tokens=12, temperature=0.0),
    ],
    ids=["T1", "T0.7", "top_p", "top_k", "top_k-then-top_p", "banned", "greedy"],
)
def test_logprobs_are_those_of_transformers(engine: Engine, model: Any, params: SamplingParams) -> None:
    if engine.kind == "sglang" and params.top_p < 1.0:
        # SGLang reports such log-probs only with a top_k. Its top_p uses the probabilities before top_k.
        params = msgspec.structs.replace(params, top_k=VOCAB)
    version = engine.version
    responses = engine.generate(prompts_of(*PROMPTS), params)
    assert len(responses) == len(PROMPTS) * params.n
    gap = 0.0
    for response in responses:
        assert len(response.output_ids) == len(response.logprobs) <= params.max_new_tokens
        assert all(0 <= token < VOCAB for token in response.output_ids)
        assert not set(response.output_ids.tolist()) & set(params.banned_token_ids)
        assert response.versions.tolist() == [version] * len(response.output_ids)
        expected = transformers_logprobs(model, PROMPTS[response.prompt], response, params)
        gap = max(gap, float((expected - torch.tensor(response.logprobs)).abs().max()))
    assert gap <= TOLERANCE


def test_greedy_tokens_are_those_of_transformers_generate(engine: Engine, model: Any) -> None:
    responses = engine.generate(prompts_of(*PROMPTS), SamplingParams(max_new_tokens=24, temperature=0.0))
    for prompt, response in zip(PROMPTS, responses, strict=True):
        with torch.no_grad():
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
        assert response.output_ids.tolist() == expected.tolist()


def test_a_long_prompt_goes_through_prefill_in_chunks(engine: Engine, model: Any) -> None:
    prompts = [random_prompt(length, seed=length) for length in (1900, 1201, 700, 30)]
    params = SamplingParams(n=2, max_new_tokens=4)
    for response in engine.generate(prompts_of(*prompts), params):
        expected = transformers_logprobs(model, prompts[response.prompt], response, params)
        assert float((expected - torch.tensor(response.logprobs)).abs().max()) <= TOLERANCE


def test_untied_head_and_bfloat16(start_engine: Any, tmp_path: Path) -> None:
    model = make_model(tmp_path, seed=4, tied=False)
    prompts, params = [random_prompt(9), random_prompt(20)], SamplingParams(n=3, max_new_tokens=8)
    for dtype, tolerance in (("float32", TOLERANCE), ("bfloat16", 0.3)):
        for response in start_engine(model_folder=tmp_path, dtype=dtype).generate(prompts_of(*prompts), params):
            expected = transformers_logprobs(model, prompts[response.prompt], response, params)
            assert float((expected - torch.tensor(response.logprobs)).abs().max()) <= tolerance
