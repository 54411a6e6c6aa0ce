"""Tests the pool with two real engine processes: routing of prompts, and recovery after an engine is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.engine import EngineError, EngineUnreachable, Generated, PromptRequest, SamplingParams
from relax_core.contracts.process_trees import process_state
from relax_core.engines.engine_pool import EnginePool
from tests.contracts.engine.harness import CONTEXT, EOS, Engine, make_model, prompts_of, publish
from tests.engines.pool_harness import (
    SHORT,
    Directory,
    Flawed,
    collect_groups,
    decode_a_little,
    generate,
    kill,
    list_groups,
    tokens,
    until,
)

LENGTHS = SamplingParams(n=4, max_new_tokens=1200, stop_token_ids=[EOS])  # the stop token ends the samples one by one
# Rounding differs by about 1e-6 between batch sizes and between CPUs. With this seed, no random number is within 3e-5
# of the boundary to another token.
LENGTHS_SEED = 21


def test_prompts_go_to_their_engines_and_come_back_whole(start_engine: Callable[..., Engine]) -> None:
    first, second = start_engine(), start_engine()
    prompts = prompts_of(*([5 + index, 6] for index in range(5)))
    directory, ends = Directory(first, second), []
    found = generate(directory, prompts, SHORT, ends=ends)
    assert sorted(index for index, _ in found) == [0, 1, 2, 3, 4]
    for index, responses in found:
        assert sorted(response.sample for response in responses) == [0, 1, 2]
        assert {response.rid for response in responses} == {f"prompt-{index}"}
    assert sorted(directory.calls) == [0, 1]  # one request per engine
    assert len(ends) == 2  # each engine reports its own times
    alone = generate(Directory(first), prompts, SHORT)
    assert tokens(alone) == tokens(found)  # a sample does not depend on its engine


def test_an_engine_without_a_share_is_not_asked(start_engine: Callable[..., Engine]) -> None:
    directory = Directory(start_engine(), start_engine())
    directory.engines[1].process.stop(timeout_s=5.0)
    assert len(generate(directory, prompts_of([5]), SHORT)) == 1
    assert directory.calls == [0]


def test_what_a_killed_engine_owed_is_redone_and_nothing_else(
    start_engine: Callable[..., Engine], start_slow_engine: Callable[[], Engine]
) -> None:
    """One engine is killed in the middle of a group. The pool requests only missing samples from the other engine."""
    first, second = start_engine(), start_slow_engine()
    prompts = prompts_of(*([5 + index, 6] for index in range(8)), seed=LENGTHS_SEED)  # 1, 3, 5, 7 go to engine 1
    expected = tokens(generate(Directory(first), prompts, LENGTHS))
    directory = Directory(first, second)

    def finished() -> Counter[str]:
        return Counter(response.rid for engine, response in directory.came if engine == 1)

    def all_came() -> bool:
        loads = second.client.loads()
        return finished().total() + loads["running"] + loads["queued"] == 16

    async def scene() -> list[tuple[int, list[Generated]]]:
        pool = EnginePool(2, directory.client_for, timeout_s=60.0)
        second.client.pause("in_place")
        collecting = asyncio.ensure_future(list_groups(pool.generate(prompts, LENGTHS, places=range(8))))
        while not any(0 < samples < 4 for samples in finished().values()):
            assert finished().total() < 16, "all groups ended as a whole"
            decode_a_little(second)
            await until("what the engine has finished did not come", all_came)
        kill(second)
        found = await collecting
        await directory.close()
        return found

    found = asyncio.run(scene())
    assert Counter(index for index, _ in found) == dict.fromkeys(range(8), 1)
    assert tokens(found) == expected  # a sample has its seed, so drawing it again gives the same tokens
    assert Counter(response.rid for _, response in directory.came) == {prompt.rid: 4 for prompt in prompts}, (
        "none came twice"
    )
    parts = {prompt.rid: prompt.samples for _, prompt in directory.requests if prompt.samples is not None}
    assert parts, "no group was partly generated"
    assert all(0 < len(samples) < 4 for samples in parts.values() if samples)
    assert {engine for engine, prompt in directory.requests if prompt.samples is not None} == {0}


def test_a_killed_engine_in_mid_generation_is_asked_anew(start_engine: Callable[..., Engine], tmp_path: Path) -> None:
    """The only engine is killed while it has a prompt for a later version. The engine's successor has this version."""
    first = start_engine()
    held = PromptRequest(rid="held", input_ids=[7, 8], sampling_seed=3, min_version=1)

    def replace(engine: int) -> Engine:
        on_policy = start_engine()
        on_policy.client.update_weights(publish(make_model(None, seed=1), tmp_path / "weights", version=1))
        return on_policy

    directory = Directory(first, replace=replace)
    found = generate(directory, [*prompts_of([5, 6]), held], SHORT, on_done=lambda index: index or kill(first))
    assert [index for index, _ in found] == [0, 1]
    assert {version for response in found[1][1] for version in response.versions.tolist()} == {1}
    assert directory.asked == [(0, False), (0, True), (0, False)]


def test_patience_ends_with_the_engines_numbers(start_engine: Callable[..., Engine]) -> None:
    first, second = start_engine(), start_engine()
    kill(first)
    kill(second)
    directory = Directory(first, second)
    with pytest.raises(EngineUnreachable, match=r"no engine has answered anything for 0\.3 s") as error:
        generate(directory, prompts_of([5], [6]), SHORT, timeout_s=0.3)
    assert f"engine 0: engine {first.process.url}" in str(error.value)
    assert f"engine 1: engine {second.process.url}" in str(error.value)
    assert {(0, True), (1, True)} <= set(directory.asked)


def test_a_long_silence_before_the_death_does_not_use_up_the_patience(start_engine: Callable[..., Engine]) -> None:
    """A prompt that waits for weights is silent for a complete train step. The timeout starts at the loss."""
    first = start_engine()
    held = [PromptRequest(rid="held", input_ids=[7, 8], sampling_seed=3, min_version=9)]
    directory = Directory(first)

    async def scene() -> None:
        pool = EnginePool(1, directory.client_for, timeout_s=0.3)
        waiting = asyncio.ensure_future(anext(pool.generate(held, SHORT, places=[0])))
        await until("it is not held", lambda: first.client.loads()["held"] == 3)
        await asyncio.sleep(0.6)  # twice the timeout, without an error
        kill(first)
        with pytest.raises(EngineUnreachable, match="no engine has answered anything"):
            await waiting
        await directory.close()

    asyncio.run(scene())
    assert (0, True) in directory.asked  # the pool tried the engine again before it gave up


def test_a_straggler_is_named_and_what_it_holds_goes_to_another(
    start_engine: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = start_engine(), start_engine()
    first.client.update_weights(publish(make_model(None, seed=1), tmp_path / "weights", version=2))
    prompts = [
        PromptRequest(rid=f"held-{index}", input_ids=[7, index], sampling_seed=3, min_version=2) for index in range(4)
    ]
    directory = Directory(first, second)

    async def scene() -> dict[int, list[Generated]]:
        pool = EnginePool(2, directory.client_for, timeout_s=60.0, max_lag=1, lag_s=0.2)
        found = await collect_groups(pool.generate(prompts, SHORT, places=range(4)))
        await directory.close()
        return found

    found = asyncio.run(scene())
    assert sorted(found) == [0, 1, 2, 3]
    assert {response.engine for responses in found.values() for response in responses} == {"engine-0"}
    assert {engine for engine, _ in directory.requests} == {0, 1}
    assert (
        "engine 1 serves weights 0 and has been more than 1 versions behind another engine (weights 2)" in caplog.text
    )


def breaks_off(prompt: PromptRequest) -> Generated:
    raise EngineUnreachable("hung up after 0 of 3 responses")


def test_an_engine_that_dies_twice_is_no_matter_while_another_lives(
    start_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no response for longer than the timeout, because the running engine waits for new weights."""
    # Both engine numbers are the same process, so each number would report the load of both.
    monkeypatch.setattr(EnginePool, "_poll_loads", lambda pool: None)
    running = start_engine()
    held = [PromptRequest(rid=f"held-{at}", input_ids=[7, at], sampling_seed=3, min_version=1) for at in range(2)]
    directory = Directory(running, running)
    flawed = Flawed(directory, {0: breaks_off})

    async def scene() -> dict[int, list[Generated]]:
        pool = EnginePool(2, flawed.client_for, timeout_s=0.3)
        collecting = asyncio.ensure_future(collect_groups(pool.generate(held, SHORT, places=[0, 1])))
        for deaths in (1, 2):
            await until("not all is held", lambda: running.client.loads()["held"] == 6)
            assert flawed.met[0] == deaths
            if deaths == 1:
                await asyncio.sleep(0.5)  # longer than the timeout
                await until("the engine is not back", lambda: pool._engines.usable() == [0, 1])
                await pool.abort(["held-0"], min_version=1)  # this engine has the least load, so the prompt goes to it
                await until("it was not asked again", lambda: flawed.met[0] == 2 or collecting.done())
        running.client.update_weights(publish(make_model(None, seed=1), tmp_path / "weights", version=1))
        found = await collecting
        await directory.close()
        return found

    assert sorted(asyncio.run(scene())) == [0, 1]


def test_what_a_silent_engine_owes_is_asked_of_another(
    start_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine is stopped while it has prompts. After it continues, it drops these prompts and gets new prompts."""
    running, silent = start_engine(), start_engine()
    prompts = prompts_of([5, 6], [7, 8], [9, 10], [11, 12])
    expected = tokens(generate(Directory(running), prompts, SHORT))
    silent.client.pause("in_place")
    directory = Directory(running, silent)

    async def scene() -> list[tuple[int, list[Generated]]]:
        pool = EnginePool(2, directory.client_for, timeout_s=600.0, silent_s=1.0)
        collecting = asyncio.ensure_future(list_groups(pool.generate(prompts, SHORT, places=range(4))))
        await until("it has its share", lambda: silent.client.loads()["queued"] == 6)
        os.kill(silent.process.pid, signal.SIGSTOP)
        try:
            found = await collecting
            assert pool._engines.usable() == [0]
        finally:
            os.kill(silent.process.pid, signal.SIGCONT)
        await until("it owes nothing", lambda: silent.client.loads()["queued"] == 0)
        silent.client.resume()
        await until("it may be asked again", lambda: pool._engines.usable() == [0, 1])
        again = prompts_of([5, 6], [7, 8])
        assert len(await list_groups(pool.generate(again, SHORT, places=range(2)))) == 2
        await directory.close()
        return found

    found = asyncio.run(scene())
    assert tokens(found) == expected
    assert {response.engine for _, responses in found for response in responses} == {"engine-0"}
    assert directory.calls.count(1) == 2, "it got one call before the stop and one after"
    assert "engine-1 does not answer; its open samples are requested again" in caplog.text
    assert "/ready: no answer within 0.5 s" in caplog.text, "its stream ended by itself"


def test_a_frozen_engine_is_looked_at_once(start_engine: Callable[..., Engine], monkeypatch: Any) -> None:
    """Each poll of the frozen engine blocks one of a few threads, and rewards and aborts need these threads."""
    heard: list[int] = []
    monkeypatch.setattr(EnginePool, "_record_other_load", lambda pool, number, others: heard.append(number))
    engine = start_engine()
    directory = Directory(engine, engine)

    async def scene() -> None:
        pool = EnginePool(2, directory.client_for, timeout_s=10.0)
        os.kill(engine.process.pid, signal.SIGSTOP)
        try:
            await until("it does not stop", lambda: process_state(engine.process.pid) == "stopped")
            for _ in range(5):
                pool._poll_loads()
                await asyncio.sleep(0)
            assert directory.asked == [(0, False), (1, False)] and not heard
        finally:
            os.kill(engine.process.pid, signal.SIGCONT)
        await until("no poll has ended", lambda: sorted(heard) == [0, 1])

        def polled_again() -> bool:
            pool._poll_loads()  # skips an engine until the loop has removed the engine's ended poll
            return heard.count(0) > 1 and heard.count(1) > 1

        await until("it is polled no more", polled_again)
        await directory.close()

    asyncio.run(scene())


def test_a_refusal_is_not_retried(start_engine: Callable[..., Engine]) -> None:
    directory = Directory(start_engine())
    with pytest.raises(EngineError, match="/generate") as refusal:
        generate(directory, prompts_of([5] * (CONTEXT + 1)), SHORT)
    assert not isinstance(refusal.value, EngineUnreachable)
    assert directory.asked == [(0, False)]


def test_an_engine_that_is_up_but_never_gets_anywhere_is_given_up(start_engine: Callable[..., Engine]) -> None:
    """The health check of the engine succeeds, but its responses break off. The number of retries is limited."""
    directory = Directory(start_engine())
    flawed = Flawed(directory, {0: breaks_off})

    async def scene() -> None:
        pool = EnginePool(1, flawed.client_for, timeout_s=0.5)
        with pytest.raises(EngineUnreachable, match=r"engine-0 has answered nothing for \d+\.\d s; last: hung up"):
            await collect_groups(pool.generate(prompts_of([5]), SHORT, places=[0]))

    asyncio.run(scene())
    assert 1 <= directory.asked.count((0, True)) <= 6, "it was retried, but not in a busy loop"
