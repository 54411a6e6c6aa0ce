"""Tests that many concurrent requests, more than fit into a batch, get the same responses as single requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from tests.contracts.engine.harness import Engine, prompts_of, random_prompt


def test_a_hundred_requests_at_once(engine: Engine) -> None:
    params = SamplingParams(n=4, max_new_tokens=12)
    prompts = prompts_of(*[random_prompt(3 + index % 20, seed=index) for index in range(100)])

    async def everything() -> list[list[Generated]]:
        client = engine.new_client()

        async def answers_to(prompt: PromptRequest) -> list[Generated]:
            return [found async for found in client.generate([prompt], params)]

        try:
            return await asyncio.gather(*[answers_to(prompt) for prompt in prompts])
        finally:
            await client.aclose()

    answers = asyncio.run(everything())
    expected = engine.generate(prompts, params)
    for index, answer in enumerate(answers):
        found = sorted(answer, key=lambda response: response.sample)
        assert [response.output_ids.tolist() for response in found] == [
            response.output_ids.tolist() for response in expected if response.prompt == index
        ]


def test_more_samples_than_slots_wait_their_turn(engine: Engine, wait_until: Callable[..., None]) -> None:
    prompts = prompts_of(*[random_prompt(8, seed=index) for index in range(40)])
    responses = engine.generate(prompts, SamplingParams(n=16, max_new_tokens=8))
    assert len(responses) == 640
    assert {(response.prompt, response.sample) for response in responses} == {
        (p, k) for p in range(40) for k in range(16)
    }
    wait_until(lambda: engine.client.loads()["running"] == 0, what="an idle engine")


def test_short_samples_beside_one_that_needs_the_whole_context(engine: Engine) -> None:
    long = prompts_of(random_prompt(1000, seed=1))
    short = [
        PromptRequest(rid=f"short-{index}", input_ids=random_prompt(5, seed=index), sampling_seed=index)
        for index in range(100)
    ]

    async def both() -> tuple[list[Generated], list[Generated]]:
        client = engine.new_client()

        async def collect(prompts: list[PromptRequest], params: SamplingParams) -> list[Generated]:
            return [response async for response in client.generate(prompts, params)]

        try:
            big = SamplingParams(max_new_tokens=1000, temperature=0.0)
            return await asyncio.gather(collect(long, big), collect(short, SamplingParams(max_new_tokens=6)))
        finally:
            await client.aclose()

    first, second = asyncio.run(both())
    assert len(first) == 1 and len(second) == 100
