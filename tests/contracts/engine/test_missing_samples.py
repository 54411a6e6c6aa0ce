"""Tests repeated requests: for some samples of a prompt, and for responses that continue earlier tokens."""

from __future__ import annotations

import msgspec
import pytest

from relax_core.contracts.engine import SamplingParams
from tests.contracts.engine.harness import EOS, Engine, prompts_of, random_prompt

PARAMS = SamplingParams(n=6, max_new_tokens=12, temperature=0.9, banned_token_ids=[EOS])


def test_some_samples_are_those_of_the_whole(engine: Engine) -> None:
    """Each sample keeps its seed. The prompts of one request may lack different samples."""
    prompts = prompts_of(random_prompt(5), random_prompt(9, seed=1), random_prompt(3, seed=2))
    whole = {(response.prompt, response.sample): response for response in engine.generate(prompts, PARAMS)}
    asked = [[4, 1], None, [0]]
    parts = engine.generate(
        [msgspec.structs.replace(prompt, samples=samples) for prompt, samples in zip(prompts, asked, strict=True)],
        PARAMS,
    )
    expected = [(0, 1), (0, 4), *((1, sample) for sample in range(6)), (2, 0)]
    assert [(part.prompt, part.sample) for part in parts] == expected
    for part in parts:
        assert part.output_ids.tolist() == whole[part.prompt, part.sample].output_ids.tolist()


@pytest.mark.parametrize("begun", [1, 5, 11])
def test_a_response_goes_on_from_its_own_prefix(engine: Engine, begun: int) -> None:
    """The continued response has the same random numbers, log-probs and length as without interruption."""
    (prompt,) = prompts_of(random_prompt(7))
    calm = engine.generate([prompt], PARAMS)
    again = [
        msgspec.structs.replace(
            prompt,
            input_ids=prompt.input_ids + response.output_ids[:begun].tolist(),
            samples=[response.sample],
            generated=begun,
        )
        for response in calm
    ]
    rests = engine.generate(again, PARAMS)
    assert [(rest.prompt, rest.sample) for rest in rests] == [(sample, sample) for sample in range(6)]
    for whole, rest in zip(calm, rests, strict=True):
        assert rest.output_ids.tolist() == whole.output_ids[begun:].tolist()
        assert rest.logprobs == pytest.approx(whole.logprobs[begun:], abs=2e-5)
        assert len(rest.versions) == 12 - begun and len(set(rest.versions.tolist())) == 1
        assert rest.finish_reason == whole.finish_reason == "length"


def test_continued_samples_of_a_group_are_aborted_by_its_one_rid(engine: Engine) -> None:
    held = [
        msgspec.structs.replace(prompt, rid="group", samples=[sample], generated=1, min_version=10**6)
        for sample, prompt in enumerate(prompts_of([5, 6], [5, 7]))
    ]

    import asyncio

    async def scene() -> list[str]:
        client = engine.new_client()

        async def collect() -> list[str]:
            return [response.finish_reason async for response in client.generate(held, PARAMS)]

        collecting = asyncio.ensure_future(collect())
        while not collecting.done():
            await asyncio.to_thread(client.abort, "group")
            await asyncio.wait({collecting}, timeout=0.05)
        await client.aclose()
        return collecting.result()

    assert asyncio.run(scene()) == ["abort", "abort"]
