"""Tests that aborted samples continue from their prefixes, and that engines end cancelled prompts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_core.contracts.engine import EngineError, Generated, PromptRequest, SamplingParams
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.engines.engine_pool import EnginePool
from tests.contracts.engine.harness import EOS, Engine, make_model, prompts_of, publish
from tests.engines.pool_harness import (
    DEADLINE_S,
    SHORT,
    Directory,
    Flawed,
    collect_groups,
    continued,
    decodes,
    generate,
    kill,
    tokens,
    until,
)
from tests.responses import response

# Rounding differs by about 1e-6 between batch sizes and between CPUs. With these seeds, no random number is within 2e-5
# of the boundary to another token.
ABORTED_SEED, DIES_SEED = 72, 33
TOKENS = 250


def test_aborted_samples_go_on_from_their_prefixes_as_if_nothing_had_happened(
    start_slow_engine: Callable[[], Engine],
) -> None:
    """With the same weights the samples get the tokens of an undisturbed run: random numbers depend on the position."""
    engine = start_slow_engine()
    params = SamplingParams(n=3, max_new_tokens=TOKENS, banned_token_ids=[EOS])
    prompts = prompts_of([5, 6], [7], [8, 9], seed=ABORTED_SEED)
    calm = dict(generate(Directory(engine), prompts, params))
    directory = Directory(engine)

    async def scene() -> dict[int, list[Generated]]:
        pool = EnginePool(1, directory.client_for, timeout_s=60.0)
        engine.client.pause("in_place")
        groups = pool.generate(prompts, params, places=[0, 1, 2])
        collecting = asyncio.ensure_future(collect_groups(groups))
        for round_ in (1, 2):
            await until("it does not decode", decodes(engine))
            await pool.abort(["prompt-0", "prompt-2", "nobody"], min_version=0)
            await until("nothing went on", lambda n=round_: continued(directory) == 6 * n)
            await until("not all of it came", lambda: engine.client.loads()["queued"] == 6)
        engine.client.resume()
        found = await collecting
        await directory.close()
        return found

    found = asyncio.run(scene())
    stop = lambda index: [generated.output_ids.tolist() for generated in calm[index]]  # noqa: E731
    for index in (0, 1, 2):
        assert [generated.output_ids.tolist() for generated in found[index]] == stop(index)
        for generated, quiet in zip(found[index], calm[index], strict=True):
            assert generated.logprobs == pytest.approx(quiet.logprobs, abs=2e-5)
            assert generated.versions.tolist() == [0] * len(generated.output_ids)
            assert generated.finish_reason == quiet.finish_reason
    assert {prompt.rid for _, prompt in directory.requests if prompt.generated} == {"prompt-0", "prompt-2"}


def test_what_is_aborted_at_a_weight_change_goes_on_with_the_new_weights(
    start_slow_engine: Callable[[], Engine], tmp_path: Path
) -> None:
    """Tokens keep version and kept set. After the change, the new weights sample tokens for the complete prefix."""
    engine, new = start_slow_engine(), make_model(None, seed=1)
    params = SamplingParams(
        n=2, max_new_tokens=TOKENS, banned_token_ids=[EOS], top_p=0.9, top_k=12, return_kept_tokens=True
    )
    request = PromptRequest(rid="group", input_ids=[5, 6], sampling_seed=3)
    directory = Directory(engine)

    async def scene() -> list[Generated]:
        pool = EnginePool(1, directory.client_for, timeout_s=60.0)
        engine.client.pause("in_place")
        collecting = asyncio.ensure_future(collect_groups(pool.generate([request], params, places=[0])))
        await until("it does not decode", decodes(engine))
        await pool.abort(["group"], min_version=1)
        await until("nothing is held", lambda: engine.client.loads()["held"] == 2)
        engine.client.resume()
        engine.client.update_weights(publish(new, tmp_path / "one", version=1))
        found = await collecting
        await directory.close()
        return found[0]

    for generated in asyncio.run(scene()):
        change = int(np.argmax(generated.versions))
        assert generated.versions.tolist() == [0] * change + [1] * (TOKENS - change) and 0 < change < TOKENS
        assert len(generated.output_ids) == len(generated.logprobs) == TOKENS
        assert generated.kept is not None and generated.kept.fault(generated.output_ids) is None
        expected = logprobs_of(new, request.input_ids, generated.output_ids.tolist(), generated.kept)[change:]
        assert generated.logprobs[change:] == pytest.approx(expected, abs=2e-5)


@torch.no_grad()
def logprobs_of(model: Any, prompt: list[int], response: list[int], kept: KeptTokens) -> list[float]:
    """Returns the log-probs of the response's tokens over their kept sets. Kept sets never contain the end token."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    mask = kept.mask()
    assert not mask[:, EOS].any() and mask.sum(1).max() <= 12
    logits = logits.masked_fill(torch.from_numpy(~mask), -torch.inf)
    chosen: list[float] = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()
    return chosen


def test_a_prompt_that_is_given_up_ends_at_the_engine_too(start_slow_engine: Callable[[], Engine]) -> None:
    engine = start_slow_engine()
    params = SamplingParams(n=2, max_new_tokens=20000, banned_token_ids=[EOS])
    directory = Directory(engine)

    async def scene() -> list[int]:
        pool = EnginePool(1, directory.client_for, timeout_s=60.0)
        engine.client.pause("in_place")
        prompts = prompts_of([5], [6])
        collecting = asyncio.ensure_future(collect_groups(pool.generate(prompts, params, places=[0, 1])))
        await until("it does not decode", decodes(engine))
        assert engine.client.loads()["running"] == 4
        await pool.cancel(["prompt-1"])
        assert engine.client.loads()["running"] == 2
        await pool.cancel(["prompt-0", "prompt-1"])
        found = await collecting
        await directory.close()
        return list(found)

    assert asyncio.run(scene()) == []
    assert engine.client.loads()["running"] == 0


def test_an_engine_dies_when_another_has_what_it_was_asked_for(
    start_engine: Callable[..., Engine], start_slow_engine: Callable[[], Engine]
) -> None:
    """An aborted prompt moves to another engine. The first stream continues with other prompts and then breaks."""
    first, second = start_slow_engine(), start_engine()
    params = SamplingParams(n=2, max_new_tokens=TOKENS, banned_token_ids=[EOS])
    # prompts 0 and 2 go to engine 0; the aborted prompt 0 then goes to engine 1
    prompts = prompts_of([5], [6, 7], [8, 9, 4], seed=DIES_SEED)
    expected = tokens(generate(Directory(second), prompts, params))
    directory = Directory(first, second)

    async def scene() -> list[tuple[int, list[Generated]]]:
        pool = EnginePool(2, directory.client_for, timeout_s=60.0)
        first.client.pause("in_place")
        collecting = asyncio.ensure_future(collect_groups(pool.generate(prompts, params, places=[0, 1, 2])))
        await until("it does not decode", decodes(first))
        await pool.abort(["prompt-0"], min_version=0)
        await until("nothing went on", lambda: continued(directory) == 2)
        assert {engine for engine, prompt in directory.requests if prompt.generated} == {1}
        kill(first)
        found = await collecting
        await directory.close()
        return list(found.items())

    assert tokens(asyncio.run(scene())) == expected
    assert Counter(prompt.rid for engine, prompt in directory.requests if engine == 1) == {
        "prompt-0": 2,  # each sample continues from its own prefix
        "prompt-1": 1,
        "prompt-2": 1,
    }


def test_an_engine_that_aborts_without_a_token_is_not_asked_for_ever(start_engine: Callable[..., Engine]) -> None:
    def aborts(prompt: PromptRequest) -> Generated:
        return response([], versions=[], rid=prompt.rid, finish_reason="abort")

    flawed = Flawed(Directory(start_engine()), {0: aborts})

    async def scene() -> None:
        pool = EnginePool(1, flawed.client_for, timeout_s=10.0)
        params = SamplingParams(n=1, max_new_tokens=4)
        with pytest.raises(EngineError, match=r"engine-0 aborted sample 0 of prompt prompt-0, .* 5 times in a row"):
            await asyncio.wait_for(collect_groups(pool.generate(prompts_of([5]), params, places=[0])), DEADLINE_S)

    asyncio.run(scene())
    assert flawed.met[0] == 5


def test_what_is_given_up_before_it_was_asked_for_is_not_asked_for() -> None:
    directory = Directory()

    async def scene() -> dict[int, list[Generated]]:
        pool = EnginePool(1, directory.client_for, timeout_s=10.0)
        collecting = asyncio.ensure_future(collect_groups(pool.generate(prompts_of([5], [6]), SHORT, places=[0, 1])))
        await asyncio.sleep(0)  # the prompt is assigned, but the request is not sent yet
        await pool.cancel(["prompt-0", "prompt-1"])
        return await collecting

    assert asyncio.run(scene()) == {}
    assert directory.asked == []
