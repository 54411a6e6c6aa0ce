"""Tests that a sample depends on its seed and not on its batch."""

from __future__ import annotations

import pytest

from relax_core.contracts.engine import SamplingParams
from tests.contracts.engine.harness import Engine, embedded_only, prompts_of, random_prompt
from tests.responses import content


def test_same_seed_same_tokens_alone_and_in_a_batch(engine: Engine) -> None:
    params = SamplingParams(n=4, max_new_tokens=16)
    prompts = prompts_of(*[random_prompt(4 + 3 * index, seed=index) for index in range(8)])
    together = engine.generate(prompts, params)
    for index, prompt in enumerate(prompts):
        alone = engine.generate([prompt], params)
        batch = [response for response in together if response.prompt == index]
        assert [response.output_ids.tolist() for response in alone] == [
            response.output_ids.tolist() for response in batch
        ]
        for left, right in zip(alone, batch, strict=True):
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)


def test_samples_of_a_prompt_and_seeds_differ(engine: Engine) -> None:
    params = SamplingParams(n=8, max_new_tokens=16)
    prompt = random_prompt(6)
    first, second = (engine.generate(prompts_of(prompt, seed=seed), params) for seed in (1, 2))
    assert len({tuple(response.output_ids.tolist()) for response in first + second}) == 16


def test_the_same_request_twice_is_the_same_to_the_bit(engine: Engine) -> None:
    params = SamplingParams(n=16, max_new_tokens=8)
    prompts = prompts_of(*[random_prompt(16, seed=index) for index in range(4)])
    first, second = engine.generate(prompts, params), engine.generate(prompts, params)
    if engine.kind == "embedded":
        assert [content(response) for response in first] == [content(response) for response in second]
    for left, right in zip(first, second, strict=True):  # SGLang caches the prefill: another batch
        assert left.output_ids.tolist() == right.output_ids.tolist()
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)


@embedded_only
def test_seed_in_sampling_params_as_sglang_has_it(engine: Engine) -> None:
    body = {"input_ids": random_prompt(6), "sampling_params": {"max_new_tokens": 8, "sampling_seed": 5}}
    expected = engine.generate(prompts_of(random_prompt(6), seed=5), SamplingParams(max_new_tokens=8))
    assert engine.post("/generate", body)["output_ids"] == expected[0].output_ids.tolist()
