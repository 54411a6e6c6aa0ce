"""Two real engine processes behind the pool: who gets which prompt, and what a death costs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core.contracts.engine import EngineError, EngineUnreachable, Generated, PromptRequest, SamplingParams
from relax_core.engines.client import EngineClient
from relax_core.engines.pool import EnginePool
from relax_core.engines.wire import StreamEnd
from tests.contracts.engine.harness import CONTEXT, Engine, make_model, prompts_of, publish

SHORT = SamplingParams(n=3, max_new_tokens=4)


class Directory:
    """Gives the pool its clients, and remembers what it asked for. ``replace``: called for a fresh address."""

    def __init__(self, *engines: Engine, replace: Callable[[int], Engine] | None = None) -> None:
        self.engines = list(engines)
        self.asked: list[tuple[int, bool]] = []
        self._replace = replace
        self._clients: list[EngineClient] = []

    async def client_for(self, engine: int, fresh: bool) -> EngineClient:
        self.asked.append((engine, fresh))
        if fresh and self._replace is not None:
            self.engines[engine] = await asyncio.to_thread(self._replace, engine)
            self._replace = None
        client = self.engines[engine].new_client()
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


def generate(
    directory: Directory,
    prompts: list[PromptRequest],
    params: SamplingParams,
    *,
    patience_s: float = 60.0,
    on_done: Callable[[int], None] = lambda place: None,
    ends: list[StreamEnd] | None = None,
) -> list[tuple[int, list[Generated]]]:
    async def collect() -> list[tuple[int, list[Generated]]]:
        pool = EnginePool(len(directory.engines), directory.client_for, patience_s=patience_s)
        found = []
        try:
            async for place, responses in pool.generate(
                prompts, params, places=range(len(prompts)), on_end=None if ends is None else ends.append
            ):
                found.append((place, responses))
                on_done(place)
        finally:
            await directory.close()
        return found

    return asyncio.run(collect())


def tokens(found: list[tuple[int, list[Generated]]]) -> dict[int, list[list[int]]]:
    return {
        place: [one.output_ids for one in sorted(responses, key=lambda one: one.sample)] for place, responses in found
    }


def test_prompts_go_to_their_engines_and_come_back_whole(start_engine: Callable[..., Engine]) -> None:
    first, second = start_engine(), start_engine()
    prompts = prompts_of(*([5 + place, 6] for place in range(5)))
    directory, ends = Directory(first, second), []
    found = generate(directory, prompts, SHORT, ends=ends)
    assert sorted(place for place, _ in found) == [0, 1, 2, 3, 4]
    for place, responses in found:
        assert sorted(one.sample for one in responses) == [0, 1, 2]
        assert {one.rid for one in responses} == {f"prompt-{place}"}
    assert sorted(directory.asked) == [(0, False), (1, False)]
    assert len(ends) == 2  # each engine tells its own times
    alone = generate(Directory(first), prompts, SHORT)
    assert tokens(alone) == tokens(found)  # a sample does not depend on where it was drawn


def test_an_engine_without_a_share_is_not_asked(start_engine: Callable[..., Engine]) -> None:
    directory = Directory(start_engine(), start_engine())
    directory.engines[1].process.stop(timeout_s=5.0)
    assert len(generate(directory, prompts_of([5]), SHORT)) == 1
    assert directory.asked == [(0, False)]


def test_what_a_killed_engine_owed_is_redone_and_nothing_else(start_engine: Callable[..., Engine]) -> None:
    first, second = start_engine(), start_engine()
    # Prompts of engine 1 are 1, 3, 5, 7; the stop token ends samples at different lengths, so prompts end one by one.
    prompts = prompts_of(*([5 + place, 6] for place in range(8)))
    params = SamplingParams(n=4, max_new_tokens=1200, stop_token_ids=[3])
    expected = tokens(generate(Directory(first), prompts, params))
    killed: list[int] = []

    def kill_after_first(place: int) -> None:
        if place % 2 == 1 and not killed:
            killed.append(place)
            os.kill(second.process.pid, signal.SIGKILL)

    directory = Directory(first, second, replace=lambda engine: start_engine())
    found = generate(directory, prompts, params, on_done=kill_after_first)
    assert killed
    assert Counter(place for place, _ in found) == dict.fromkeys(range(8), 1)
    assert tokens(found) == expected  # seeds belong to samples: a redone prompt gets the same tokens
    assert all(len(responses) == 4 for _, responses in found)
    assert directory.asked.count((0, False)) == 1 and (0, True) not in directory.asked


def test_a_killed_engine_in_mid_generation_is_asked_anew(start_engine: Callable[..., Engine], tmp_path: Path) -> None:
    """No prompt of engine 1 can be complete when it dies: it holds them for a version that never comes."""
    first, second = start_engine(), start_engine()
    held = PromptRequest(rid="held", input_ids=[7, 8], sampling_seed=3, min_version=1)

    def replace(engine: int) -> Engine:
        fresh = start_engine()
        fresh.client.update_weights(publish(make_model(None, seed=1), tmp_path / "weights", version=1))
        return fresh

    def kill_second(place: int) -> None:
        if place == 0:
            os.kill(second.process.pid, signal.SIGKILL)

    directory = Directory(first, second, replace=replace)
    found = generate(directory, [*prompts_of([5, 6]), held], SHORT, on_done=kill_second)
    assert [place for place, _ in found] == [0, 1]
    assert {span.version for one in found[1][1] for span in one.weight_versions} == {1}
    assert directory.asked == [(0, False), (1, False), (1, True)]


def test_patience_ends_with_the_engines_number(start_engine: Callable[..., Engine]) -> None:
    first, second = start_engine(), start_engine()
    os.kill(second.process.pid, signal.SIGKILL)
    directory = Directory(first, second)
    with pytest.raises(EngineUnreachable, match=rf"engine 1 has answered nothing for 0\.3 s.*{second.process.url}"):
        generate(directory, prompts_of([5], [6]), SHORT, patience_s=0.3)
    assert (1, True) in directory.asked


def test_a_long_silence_before_the_death_does_not_use_up_the_patience(start_engine: Callable[..., Engine]) -> None:
    """A held prompt is silent for as long as a train step lasts; patience counts from the loss."""
    first = start_engine()
    held = [PromptRequest(rid="held", input_ids=[7, 8], sampling_seed=3, min_version=9)]
    directory = Directory(first)

    async def scene() -> None:
        pool = EnginePool(1, directory.client_for, patience_s=0.3)
        waiting = asyncio.ensure_future(anext(pool.generate(held, SHORT, places=[0])))
        await asyncio.sleep(0.6)  # twice the patience, and nothing is wrong
        os.kill(first.process.pid, signal.SIGKILL)
        with pytest.raises(EngineUnreachable, match="engine 0 has answered nothing"):
            await waiting
        await directory.close()

    asyncio.run(scene())
    assert (0, True) in directory.asked  # it was tried again before it was given up


def test_a_refusal_is_not_retried(start_engine: Callable[..., Engine]) -> None:
    directory = Directory(start_engine())
    with pytest.raises(EngineError, match="/generate") as refusal:
        generate(directory, prompts_of([5] * (CONTEXT + 1)), SHORT)
    assert not isinstance(refusal.value, EngineUnreachable)
    assert directory.asked == [(0, False)]
