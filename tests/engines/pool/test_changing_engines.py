"""Tests that engines join and leave while the pool generates: no sample is lost or drawn twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.engines.engine_pool import EnginePool, Router
from tests.contracts.engine.harness import EOS, Engine, prompts_of
from tests.engines.pool.test_prompt_routing import prompt
from tests.engines.pool_harness import SHORT, Directory, collect_groups, decodes, generate, until

LONG = SamplingParams(n=3, max_new_tokens=250, banned_token_ids=[EOS])
SEED = 72  # with this seed no random number is within 2e-5 of the boundary to another token


def prompts() -> list[PromptRequest]:
    return prompts_of([5, 6], [7], [8, 9], [10], seed=SEED)


def test_an_engine_that_leaves_hands_its_samples_on_from_their_prefixes(
    start_slow_engine: Callable[[], Engine],
) -> None:
    """An engine joins during a call, receives prompts, leaves while it generates, and joins again with a new number."""
    first, second = start_slow_engine(), start_slow_engine()
    calm = dict(generate(Directory(first), prompts(), LONG))
    directory = Directory(first, second, second)

    async def scene() -> dict[int, list[Generated]]:
        pool = EnginePool(1, directory.client_for, timeout_s=60.0)
        first_held = [msgspec.structs.replace(prompts_of([3])[0], rid="held")]
        held = asyncio.ensure_future(collect_groups(pool.generate(first_held, LONG, places=[0])))
        await until("the first call has not begun", lambda: pool.open_samples(0) == 3)
        await pool.change_engines([0, 1], leaving=[], moved=[])
        second.client.pause("in_place")
        collecting = asyncio.ensure_future(collect_groups(pool.generate(prompts(), LONG, places=range(4))))
        await until("the newcomer has no share", lambda: pool.open_samples(1) >= 6)
        await until("it does not decode", decodes(second))

        await pool.change_engines([0], leaving=[1], moved=[])
        late = [msgspec.structs.replace(prompts_of([4])[0], rid="late")]
        later = asyncio.ensure_future(collect_groups(pool.generate(late, SHORT, places=[1])))
        await until("the prompt is not asked for", lambda: pool.open_samples(0) > 0)
        owed = pool.open_samples(1)
        assert owed >= 6, "the leaving engine continues its samples"
        await pool.change_engines([0], leaving=[1], moved=[1])
        await until("it still owes samples", lambda: pool.open_samples(1) == 0)
        await pool.change_engines([0], leaving=[], moved=[])
        found = await collecting
        assert {response.engine for response in (await later)[0]} == {"engine-0"}
        await held
        second.client.resume()
        await pool.change_engines([0, 2], leaving=[], moved=[])
        again = await collect_groups(pool.generate(prompts_of([5], [6]), SHORT, places=[0, 1]))
        assert {response.engine for responses in again.values() for response in responses} == {"engine-0", "engine-2"}
        await directory.close()
        return found

    found = asyncio.run(scene())
    assert sorted(found) == [0, 1, 2, 3]
    for index, responses in found.items():
        for response, quiet in zip(responses, calm[index], strict=True):
            assert response.output_ids.tolist() == quiet.output_ids.tolist()
            assert response.logprobs == pytest.approx(quiet.logprobs, abs=2e-5)
    went_on = [request for engine, request in directory.requests if engine == 0 and request.generated]
    assert len(went_on) >= 6, "samples continue from their prefixes"


def test_what_an_engine_owes_that_is_gone_is_asked_of_others(start_engine: Callable[..., Engine]) -> None:
    """The engine leaves without notice, as after a loss. A call that began with several engines continues with one."""
    first, second = start_engine(), start_engine()
    given = prompts_of([5, 6], [7, 8], [9, 10], [11, 12])
    directory = Directory(first, second)

    async def scene() -> dict[int, list[Generated]]:
        pool = EnginePool(2, directory.client_for, timeout_s=60.0)
        second.client.pause("in_place")
        collecting = asyncio.ensure_future(collect_groups(pool.generate(given, SHORT, places=range(4))))
        await until("it has its share", lambda: second.client.loads()["queued"] == 6)
        await pool.change_engines([0], leaving=[], moved=[])
        found = await collecting
        assert not pool._engines.down, "no call waits for the removed engine"
        await directory.close()
        return found

    found = asyncio.run(scene())
    assert {response.engine for responses in found.values() for response in responses} == {"engine-0"}
    assert Counter(response.rid for _, response in directory.came) == {response.rid: 3 for response in given}


def test_a_router_counts_places_among_the_engines_that_are_there() -> None:
    """Without loads, the router spreads prompts evenly, also if numbers have gaps. Removed engines have no load."""
    router = Router(2, by_load=False)
    router.change_engines([0, 1, 5], leaving=[])
    assert router.choose([prompt(index) for index in range(6)], usable=[0, 1, 5]) == [0, 1, 5, 0, 1, 5]
    busy = Router(1, by_load=True)
    busy.change_engines([0, 1], leaving=[])
    busy.add_load(1, 100.0)
    busy.change_engines([0], leaving=[1])
    busy.subtract_load(1, 40.0)
    busy.change_engines([0, 1], leaving=[])  # the engine does not leave after all
    busy.add_load(0, 70.0)
    assert busy.choose([prompt(0)], usable=[0, 1]) == [1], "60 tokens of load remain there"
    busy.change_engines([0], leaving=[])
    busy.subtract_load(1, 60.0)
    busy.change_engines([0, 1], leaving=[])
    assert busy.choose([prompt(0)], usable=[0, 1]) == [1], "the removed engine has no load"
