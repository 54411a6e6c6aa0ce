"""Tests that a call can receive the tokens of a response during sampling."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from relax_core.contracts.engine import Generated, SamplingParams
from tests.contracts.engine.harness import Engine, prompts_of, random_prompt

PARAMS = SamplingParams(n=2, max_new_tokens=24)
PROMPTS = prompts_of(random_prompt(5, seed=5), random_prompt(17, seed=17))


def test_tokens_are_told_one_by_one_before_the_response_ends(engine: Engine) -> None:
    told: dict[tuple[int, int], list[int]] = defaultdict(list)
    pieces: list[int] = []
    early: list[int] = []

    def tell(prompt: int, sample: int, start: int, ids: Sequence[int]) -> None:
        assert start == len(told[prompt, sample])
        told[prompt, sample] += ids
        pieces.append(len(ids))

    async def collect() -> list[Generated]:
        client = engine.new_client()
        found = []
        try:
            async for response in client.generate(PROMPTS, PARAMS, on_tokens=tell):
                early.append(sum(map(len, told.values())))
                found.append(response)
        finally:
            await client.aclose()
        return found

    found = asyncio.run(collect())
    silent = engine.generate(PROMPTS, PARAMS)
    assert early[0] > 0 and max(pieces) <= 2
    assert [
        response.output_ids.tolist()
        for response in sorted(found, key=lambda response: (response.prompt, response.sample))
    ] == [response.output_ids.tolist() for response in silent]
    for response in found:
        ids = response.output_ids.tolist()
        assert told[response.prompt, response.sample] in (
            ids,
            ids[:-1],
        )  # the last token may arrive with the response
