"""Two real engine processes behind the pool: who gets which prompt, what a death costs, what an abort continues."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relax_core.contracts.engine import EngineError, EngineUnreachable, Generated, PromptRequest, SamplingParams
from relax_core.contracts.sample import VersionSpan
from relax_core.engines import watch as watch_module
from relax_core.engines.client import EngineClient
from relax_core.engines.pool import EnginePool
from relax_core.engines.watch import EngineWatch
from relax_core.engines.wire import StreamEnd
from tests.contracts.engine.harness import CONTEXT, EOS, TOKEN, Engine, make_model, prompts_of, publish

SHORT = SamplingParams(n=3, max_new_tokens=4)
LENGTHS = SamplingParams(n=4, max_new_tokens=1200, stop_token_ids=[EOS])  # the stop token ends them one by one


class NotedClient(EngineClient):
    """A client that notes what goes over it."""

    def __init__(self, engine: Engine, number: int, directory: Directory) -> None:
        super().__init__(engine.process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
        self._number, self._directory = number, directory

    async def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, **options: Any
    ) -> AsyncIterator[Generated]:
        self._directory.requests += [(self._number, prompt) for prompt in prompts]
        async for one in super().generate(prompts, params, **options):
            self._directory.came += [(self._number, one)]
            yield one
            self._directory.on_response(self._number, one)


class Directory:
    """Gives the pool its clients, and remembers what it asked for and what came: ``requests``, ``came`` of (engine,
    prompt or response). ``replace``: called for a fresh address; ``on_response``: after each response."""

    def __init__(
        self,
        *engines: Engine,
        replace: Callable[[int], Engine] | None = None,
        on_response: Callable[[int, Generated], None] = lambda engine, one: None,
    ) -> None:
        self.engines = list(engines)
        self.asked: list[tuple[int, bool]] = []
        self.requests: list[tuple[int, PromptRequest]] = []
        self.came: list[tuple[int, Generated]] = []
        self.on_response = on_response
        self._replace = replace
        self._clients: list[EngineClient] = []

    async def client_for(self, engine: int, fresh: bool) -> EngineClient:
        self.asked.append((engine, fresh))
        if fresh and self._replace is not None:
            self.engines[engine] = await asyncio.to_thread(self._replace, engine)
            self._replace = None
        client = NotedClient(self.engines[engine], engine, self)
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


def kill(engine: Engine) -> None:
    os.kill(engine.process.pid, signal.SIGKILL)


def test_what_a_killed_engine_owed_is_redone_and_nothing_else(start_engine: Callable[..., Engine]) -> None:
    """Killed in the middle of a group: only the samples that are missing are asked for, of the engine that lives."""
    first, second = start_engine(), start_engine()
    prompts = prompts_of(*([5 + place, 6] for place in range(8)))  # 1, 3, 5, 7 go to engine 1
    expected = tokens(generate(Directory(first), prompts, LENGTHS))
    finished: Counter[str] = Counter()

    def kill_after_a_part(engine: int, one: Generated) -> None:
        if engine == 1:
            finished[one.rid] += 1
            if finished.total() == 5:
                kill(second)

    directory = Directory(first, second, on_response=kill_after_a_part)
    found = generate(directory, prompts, LENGTHS)
    assert Counter(place for place, _ in found) == dict.fromkeys(range(8), 1)
    assert tokens(found) == expected  # seeds belong to samples: a sample that is drawn again gets the same tokens
    assert Counter(one.rid for _, one in directory.came) == {prompt.rid: 4 for prompt in prompts}, "none came twice"
    parts = {prompt.rid: prompt.samples for _, prompt in directory.requests if prompt.samples is not None}
    assert parts, "no group was in the middle"
    assert all(0 < len(samples) < 4 for samples in parts.values() if samples)
    assert {engine for engine, prompt in directory.requests if prompt.samples is not None} == {0}


def test_a_killed_engine_in_mid_generation_is_asked_anew(start_engine: Callable[..., Engine], tmp_path: Path) -> None:
    """The only engine dies with a prompt that it holds for a version that never comes; its successor has it."""
    first = start_engine()
    held = PromptRequest(rid="held", input_ids=[7, 8], sampling_seed=3, min_version=1)

    def replace(engine: int) -> Engine:
        fresh = start_engine()
        fresh.client.update_weights(publish(make_model(None, seed=1), tmp_path / "weights", version=1))
        return fresh

    directory = Directory(first, replace=replace)
    found = generate(directory, [*prompts_of([5, 6]), held], SHORT, on_done=lambda place: place or kill(first))
    assert [place for place, _ in found] == [0, 1]
    assert {span.version for one in found[1][1] for span in one.weight_versions} == {1}
    assert directory.asked == [(0, False), (0, True), (0, False)]


def test_patience_ends_with_the_engines_numbers(start_engine: Callable[..., Engine]) -> None:
    first, second = start_engine(), start_engine()
    kill(first)
    kill(second)
    directory = Directory(first, second)
    with pytest.raises(EngineUnreachable, match=r"no engine has answered anything for 0\.3 s") as error:
        generate(directory, prompts_of([5], [6]), SHORT, patience_s=0.3)
    assert f"engine 0: engine {first.process.url}" in str(error.value)
    assert f"engine 1: engine {second.process.url}" in str(error.value)
    assert {(0, True), (1, True)} <= set(directory.asked)


def test_a_long_silence_before_the_death_does_not_use_up_the_patience(start_engine: Callable[..., Engine]) -> None:
    """A held prompt is silent for as long as a train step lasts; patience counts from the loss."""
    first = start_engine()
    held = [PromptRequest(rid="held", input_ids=[7, 8], sampling_seed=3, min_version=9)]
    directory = Directory(first)

    async def scene() -> None:
        pool = EnginePool(1, directory.client_for, patience_s=0.3)
        waiting = asyncio.ensure_future(anext(pool.generate(held, SHORT, places=[0])))
        await asyncio.sleep(0.6)  # twice the patience, and nothing is wrong
        kill(first)
        with pytest.raises(EngineUnreachable, match="no engine has answered anything"):
            await waiting
        await directory.close()

    asyncio.run(scene())
    assert (0, True) in directory.asked  # it was tried again before it was given up


async def until(what: str, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not true():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


def test_aborted_samples_go_on_from_their_prefixes_as_if_nothing_had_happened(
    start_engine: Callable[..., Engine],
) -> None:
    """Under the same weights they get the tokens of an undisturbed run: random numbers go on with the position."""
    engine = start_engine()
    params = SamplingParams(n=3, max_new_tokens=2500, banned_token_ids=[EOS])
    prompts = prompts_of([5, 6], [7], [8, 9])
    calm = dict(generate(Directory(engine), prompts, params))
    directory = Directory(engine)

    async def scene() -> dict[int, list[Generated]]:
        pool = EnginePool(1, directory.client_for, patience_s=10.0)
        groups = pool.generate(prompts, params, places=[0, 1, 2])
        collecting = asyncio.ensure_future(_collect(groups))
        for round_ in (1, 2):
            done = engine.client.loads()["generated_tokens"]
            await until("it does not decode", lambda done=done: engine.client.loads()["generated_tokens"] > done + 50)
            await pool.abort(["prompt-0", "prompt-2", "nobody"], min_version=0)
            await until("nothing went on", lambda n=round_: _continued(directory) >= 4 * n)
        found = await collecting
        await directory.close()
        return found

    found = asyncio.run(scene())
    stop = lambda place: [one.output_ids for one in calm[place]]  # noqa: E731
    for place in (0, 1, 2):
        assert [one.output_ids for one in found[place]] == stop(place)
        for one, quiet in zip(found[place], calm[place], strict=True):
            assert one.logprobs == pytest.approx(quiet.logprobs, abs=2e-5)
            assert one.weight_versions == [VersionSpan(0, len(one.output_ids), 0)]
            assert one.finish_reason == quiet.finish_reason
    assert {prompt.rid for _, prompt in directory.requests if prompt.generated} == {"prompt-0", "prompt-2"}


def _continued(directory: Directory) -> int:
    return sum(prompt.generated > 0 for _, prompt in directory.requests)


async def _collect(groups: AsyncIterator[tuple[int, list[Generated]]]) -> dict[int, list[Generated]]:
    return {place: responses async for place, responses in groups}


def test_what_is_aborted_at_a_weight_change_goes_on_with_the_new_weights(
    start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """Its tokens say who made them; those behind the change are what the new weights make of the whole prefix."""
    engine = start_engine()
    params = SamplingParams(n=2, max_new_tokens=2000, banned_token_ids=[EOS])
    request = PromptRequest(rid="group", input_ids=[5, 6], sampling_seed=3)
    directory = Directory(engine)

    async def scene() -> list[Generated]:
        pool = EnginePool(1, directory.client_for, patience_s=10.0)
        collecting = asyncio.ensure_future(_collect(pool.generate([request], params, places=[0])))
        await until("it does not decode", lambda: engine.client.loads()["generated_tokens"] > 50)
        await pool.abort(["group"], min_version=1)
        await until("nothing is held", lambda: engine.client.loads()["held"] == 2)
        engine.client.update_weights(publish(make_model(None, seed=1), tmp_path / "one", version=1))
        found = await collecting
        await directory.close()
        return found[0]

    for one in asyncio.run(scene()):
        before, after = one.weight_versions
        assert (before.version, after.version) == (0, 1) and 0 < before.end == after.start
        assert after.end == len(one.output_ids) == len(one.logprobs)
        prefix = msgspec.structs.replace(
            request,
            input_ids=request.input_ids + one.output_ids[: before.end],
            generated=before.end,
            samples=[one.sample],
        )
        (redone,) = engine.generate([prefix], params)
        assert redone.output_ids == one.output_ids[before.end :]


def test_a_prompt_that_is_given_up_ends_at_the_engine_too(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine()
    params = SamplingParams(n=2, max_new_tokens=20000, banned_token_ids=[EOS])
    directory = Directory(engine)

    async def scene() -> list[int]:
        pool = EnginePool(1, directory.client_for, patience_s=10.0)
        prompts = prompts_of([5], [6])
        collecting = asyncio.ensure_future(_collect(pool.generate(prompts, params, places=[0, 1])))
        await until("it does not decode", lambda: engine.client.loads()["running"] == 4)
        await pool.cancel(["prompt-1"])
        assert engine.client.loads()["running"] == 2
        await pool.cancel(["prompt-0", "prompt-1"])
        found = await collecting
        await directory.close()
        return list(found)

    assert asyncio.run(scene()) == []
    assert engine.client.loads()["running"] == 0


def test_a_laggard_is_named_and_what_it_holds_goes_to_another(
    start_engine: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = start_engine(), start_engine()
    first.client.update_weights(publish(make_model(None, seed=1), tmp_path / "weights", version=2))
    prompts = [
        PromptRequest(rid=f"held-{place}", input_ids=[7, place], sampling_seed=3, min_version=2) for place in range(4)
    ]
    directory = Directory(first, second)

    async def scene() -> dict[int, list[Generated]]:
        pool = EnginePool(2, directory.client_for, patience_s=10.0, max_lag=1, lag_s=0.2)
        found = await _collect(pool.generate(prompts, SHORT, places=range(4)))
        await directory.close()
        return found

    found = asyncio.run(scene())
    assert sorted(found) == [0, 1, 2, 3]
    assert {one.engine for responses in found.values() for one in responses} == {"engine-0"}
    assert {engine for engine, _ in directory.requests} == {0, 1}
    assert "engine 1 serves weights 0, another one 2: more than 1 behind" in caplog.text


def test_an_engine_dies_when_another_has_what_it_was_asked_for(start_engine: Callable[..., Engine]) -> None:
    """An aborted prompt was asked again elsewhere, while the first stream went on with others and then broke."""
    first, second = start_engine(), start_engine()
    params = SamplingParams(n=2, max_new_tokens=2500, banned_token_ids=[EOS])
    prompts = prompts_of([5], [6, 7], [8, 9, 4])  # 0 and 2 go to engine 0, and 0 to engine 1 when it is aborted
    expected = tokens(generate(Directory(second), prompts, params))
    directory = Directory(first, second)

    async def scene() -> list[tuple[int, list[Generated]]]:
        pool = EnginePool(2, directory.client_for, patience_s=10.0)
        collecting = asyncio.ensure_future(_collect(pool.generate(prompts, params, places=[0, 1, 2])))
        await until("it does not decode", lambda: first.client.loads()["generated_tokens"] > 50)
        await pool.abort(["prompt-0"], min_version=0)
        await until("nothing went on", lambda: _continued(directory) >= 2)
        assert {engine for engine, prompt in directory.requests if prompt.generated} == {1}
        kill(first)
        found = await collecting
        await directory.close()
        return list(found.items())

    assert tokens(asyncio.run(scene())) == expected
    assert Counter(prompt.rid for engine, prompt in directory.requests if engine == 1) == {
        "prompt-0": 2,  # each sample from its own prefix
        "prompt-1": 1,
        "prompt-2": 1,
    }


class Flawed:
    """Gives the pool its engines; ``flaws`` takes the place of the generation of some of them."""

    def __init__(self, directory: Directory, flaws: dict[int, Callable[[PromptRequest], Generated]]) -> None:
        self._directory, self._flaws = directory, flaws
        self.met: Counter[int] = Counter()

    async def client_for(self, engine: int, fresh: bool) -> EngineClient:
        client = await self._directory.client_for(engine, fresh)
        if engine in self._flaws:

            async def flawed(prompts: Sequence[PromptRequest], *args: Any, **options: Any) -> AsyncIterator[Generated]:
                self.met[engine] += 1
                for prompt in prompts:
                    yield self._flaws[engine](prompt)

            client.generate = flawed  # type: ignore[method-assign]
        return client


def breaks_off(prompt: PromptRequest) -> Generated:
    raise EngineUnreachable("hung up after 0 of 3 responses")


def test_an_engine_that_dies_twice_is_no_matter_while_another_lives(
    start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """Nothing is answered for longer than the patience, since the engine that lives waits for new weights."""
    lives = start_engine()
    held = [PromptRequest(rid=f"held-{at}", input_ids=[7, at], sampling_seed=3, min_version=1) for at in range(2)]
    directory = Directory(lives, lives)
    flawed = Flawed(directory, {0: breaks_off})

    async def scene() -> dict[int, list[Generated]]:
        pool = EnginePool(2, flawed.client_for, patience_s=0.3)
        collecting = asyncio.ensure_future(_collect(pool.generate(held, SHORT, places=[0, 1])))
        for deaths in (1, 2):
            await until("not all is held", lambda: lives.client.loads()["held"] == 6)
            assert flawed.met[0] == deaths
            if deaths == 1:
                await asyncio.sleep(0.5)  # longer than the patience; the engine is back meanwhile
                await pool.abort(["held-0"], min_version=1)  # it has least to do, so this goes to it
                await until("it was not asked again", lambda: flawed.met[0] == 2 or collecting.done())
        lives.client.update_weights(publish(make_model(None, seed=1), tmp_path / "weights", version=1))
        found = await collecting
        await directory.close()
        return found

    assert sorted(asyncio.run(scene())) == [0, 1]


def test_an_engine_that_aborts_without_a_token_is_not_asked_for_ever(start_engine: Callable[..., Engine]) -> None:
    def aborts(prompt: PromptRequest) -> Generated:
        return Generated(
            rid=prompt.rid,
            prompt=0,
            sample=0,
            output_ids=[],
            logprobs=[],
            weight_versions=[],
            finish_reason="abort",
        )

    flawed = Flawed(Directory(start_engine()), {0: aborts})

    async def scene() -> None:
        pool = EnginePool(1, flawed.client_for, patience_s=10.0)
        params = SamplingParams(n=1, max_new_tokens=4)
        with pytest.raises(EngineError, match=r"engine-0 aborted sample 0 of prompt prompt-0, .* 5 times in a row"):
            await asyncio.wait_for(_collect(pool.generate(prompts_of([5]), params, places=[0])), 10.0)

    asyncio.run(scene())
    assert flawed.met[0] == 5


def test_what_is_given_up_before_it_was_asked_for_is_not_asked_for() -> None:
    directory = Directory()

    async def scene() -> dict[int, list[Generated]]:
        pool = EnginePool(1, directory.client_for, patience_s=10.0)
        collecting = asyncio.ensure_future(_collect(pool.generate(prompts_of([5], [6]), SHORT, places=[0, 1])))
        await asyncio.sleep(0)  # it has been sent, and the request is not made yet
        await pool.cancel(["prompt-0", "prompt-1"])
        return await collecting

    assert asyncio.run(scene()) == {}
    assert directory.asked == []


def test_a_frozen_engine_is_looked_at_once(start_engine: Callable[..., Engine], monkeypatch: Any) -> None:
    """Each look that waits for it holds a thread; there are few, and rewards and aborts need them."""
    monkeypatch.setattr(watch_module, "LOOK_S", 0.0)
    engine = start_engine()
    directory = Directory(engine, engine)
    heard: list[int] = []

    async def scene() -> None:
        watch = EngineWatch(2, directory.client_for, patience_s=10.0, max_lag=1, lag_s=60.0)
        os.kill(engine.process.pid, signal.SIGSTOP)
        try:
            for _ in range(5):
                watch.look(lambda number, samples: heard.append(number))
                await asyncio.sleep(0)
            assert directory.asked == [(0, False), (1, False)] and not heard
        finally:
            os.kill(engine.process.pid, signal.SIGCONT)
        await until("no look ended", lambda: sorted(heard) == [0, 1])
        watch.look(lambda number, samples: heard.append(number))
        await until("it is looked at no more", lambda: sorted(heard) == [0, 0, 1, 1])
        await directory.close()

    asyncio.run(scene())


def test_a_refusal_is_not_retried(start_engine: Callable[..., Engine]) -> None:
    directory = Directory(start_engine())
    with pytest.raises(EngineError, match="/generate") as refusal:
        generate(directory, prompts_of([5] * (CONTEXT + 1)), SHORT)
    assert not isinstance(refusal.value, EngineUnreachable)
    assert directory.asked == [(0, False)]


def test_an_engine_that_is_up_but_never_gets_anywhere_is_given_up(start_engine: Callable[..., Engine]) -> None:
    """Its health says yes, its answers break off: that is not tried for ever."""
    directory = Directory(start_engine())
    flawed = Flawed(directory, {0: breaks_off})

    async def scene() -> None:
        pool = EnginePool(1, flawed.client_for, patience_s=0.5)
        with pytest.raises(EngineUnreachable, match=r"engine-0 has answered nothing for 0\.\d s; last: hung up"):
            await _collect(pool.generate(prompts_of([5]), SHORT, places=[0]))

    asyncio.run(scene())
    assert 2 <= directory.asked.count((0, True)) <= 6, "it was tried again, and not in a hot loop"
