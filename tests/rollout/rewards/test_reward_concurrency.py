"""Tests that rewards do not block each other: in the event loop, in threads, async or in worker processes."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.checked_plugins import checked_reward
from relax_core.contracts.media import MediaSource
from relax_core.contracts.plugin_results import contained_spec
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec
from relax_core.registry import find_reward
from relax_core.rollout.rewards.reward_failures import RewardsFailed
from relax_core.rollout.rewards.reward_pool import RewardPool

LONG_S = 120.0  # a timeout that no test reaches
GROUPS = 8


def pool_of(
    score: Callable[..., Any], *, group: bool = False, timeout_s: float = LONG_S, **settings: Any
) -> RewardPool:
    functions = {"score_group": score} if group else {"score": score}
    spec = checked_reward(contained_spec(RewardSpec(name="mine", summary="s", config=RewardConfig, **functions)))
    return RewardPool(
        spec, RewardConfig(name="mine", timeout_s=timeout_s), **{"workers": 1, "concurrency": 32} | settings
    )


def group_of(*responses: str) -> list[RewardInput]:
    row = {"level": 3}
    return [RewardInput(response=text, stopped=True, answer="a", row=row, uid=f"u-{text}") for text in responses]


def scored(pool: RewardPool, *groups: Sequence[RewardInput]) -> list[list[RewardOutput]]:
    """Scores all groups at the same time."""

    async def score_all() -> list[list[RewardOutput]]:
        async with asyncio.timeout(LONG_S):
            return list(await asyncio.gather(*map(pool.score, groups)))

    with pool:
        return asyncio.run(score_all())


def rewards(outputs: Sequence[RewardOutput]) -> list[float | None]:
    return [output.reward for output in outputs]


def test_groups_in_threads_are_under_way_at_once_and_the_event_loop_is_free() -> None:
    all_there = threading.Barrier(GROUPS)
    let_go = threading.Event()

    def score(given: RewardInput, config: Any) -> float:
        if all_there.wait(LONG_S) == 0:
            loop.call_soon_threadsafe(let_go.set)
        assert let_go.wait(LONG_S)
        return float(len(given.response))

    async def score_all() -> list[list[RewardOutput]]:
        nonlocal loop
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(pool.score(group_of("x" * size)) for size in range(GROUPS))))

    loop: asyncio.AbstractEventLoop
    with pool_of(score) as pool:
        assert [rewards(outputs) for outputs in asyncio.run(score_all())] == [[float(size)] for size in range(GROUPS)]


def test_groups_in_worker_processes_are_under_way_at_once(tmp_path: Path) -> None:
    """Each group waits until all groups have started."""
    path = tmp_path / "waits.py"
    path.write_text(
        f"""
import time
from pathlib import Path
from relax_core.contracts.reward import RewardConfig, RewardSpec

def score(given, config):
    begun = Path({str(tmp_path)!r})
    (begun / f"{{given.response}}.begun").touch()
    while len(list(begun.glob("*.begun"))) < {GROUPS}:
        time.sleep(0.01)
    return 1.0

SPEC = RewardSpec(name="waits", summary="waits", config=RewardConfig, score=score, isolated=True)
"""
    )
    spec = find_reward(str(path))
    pool = RewardPool(spec, spec.config(name=str(path), timeout_s=LONG_S, sandbox="none"), workers=GROUPS)
    assert scored(pool, *(group_of(str(place)) for place in range(GROUPS))) == [
        [RewardOutput(reward=1.0, exact=True)]
    ] * (GROUPS)


def test_a_quick_reward_is_scored_in_the_event_loop_and_a_slow_one_in_threads() -> None:
    where: list[threading.Thread] = []
    slow = False

    def score(given: RewardInput, config: Any) -> float:
        where.append(threading.current_thread())
        if slow:
            time.sleep(0.05)
        return 1.0

    async def scene() -> None:
        nonlocal slow
        await pool.score(group_of("first"))
        assert where[-1] is not threading.current_thread()  # its duration is still unknown
        async with asyncio.timeout(LONG_S):
            while where[-1] is not threading.current_thread():
                await pool.score(group_of("a", "b"))
        slow = True
        await pool.score(group_of("a", "b"))
        where.clear()
        await pool.score(group_of("a", "b"))
        assert len(set(where)) == 2 and threading.current_thread() not in where

    with pool_of(score) as pool:
        asyncio.run(scene())


def test_an_async_reward_has_so_many_calls_under_way_and_no_more() -> None:
    under_way = most = 0

    async def score(given: RewardInput, config: Any) -> float:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        while most < 3:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        under_way -= 1
        return float(given.response)

    groups = [group_of("1", "2"), group_of("3", "4", "5")]
    assert [rewards(outputs) for outputs in scored(pool_of(score, concurrency=3), *groups)] == [[1, 2], [3, 4, 5]]
    assert most == 3


def test_an_async_reward_that_hangs_is_cancelled_and_one_that_raises_says_why() -> None:
    ended: list[str] = []

    async def score(given: RewardInput, config: Any) -> float:
        if given.response == "raise":
            raise KeyError("price")
        if given.response == "nan":
            return float("nan")
        try:
            await asyncio.sleep(0 if given.response == "quick" else LONG_S)
        finally:
            ended.append(given.response)
        return 1.0

    (outputs,) = scored(pool_of(score, timeout_s=0.5), group_of("hang", "raise", "nan", "quick"))
    assert rewards(outputs) == [None, None, None, 1.0]
    assert "reward mine: no answer within 0.5 s" in outputs[0].reason and "hang" in ended
    assert "KeyError: 'price'" in outputs[1].reason and "reward is nan" in outputs[2].reason


def test_an_async_reward_that_keeps_the_event_loop_to_itself_is_told() -> None:
    told = threading.Event()

    async def score(given: RewardInput, config: Any) -> float:
        assert told.wait(LONG_S)
        return 1.0

    (outputs,) = scored(pool_of(score, timeout_s=0.1, on_hang=lambda error: told.set()), group_of("a"))
    assert told.is_set() and len(outputs) == 1


def test_a_reward_in_many_threads_at_once_has_the_time_that_it_would_have_alone() -> None:
    told: list[Exception] = []

    def score(given: RewardInput, config: Any) -> float:
        time.sleep(0.6)  # 0.02 s of computing take this long while 31 other answers compute
        return 1.0

    scored(pool_of(score, timeout_s=0.2, on_hang=told.append), group_of(*["a"] * 32))
    assert not told


@pytest.mark.parametrize("timeout_s", [0.4, 1.0])
def test_an_answer_that_is_being_scored_at_a_check_does_not_hang(timeout_s: float) -> None:
    hung: list[Exception] = []

    def score(given: RewardInput, config: Any) -> float:
        time.sleep(timeout_s / 20)
        return 1.0

    groups = [group_of(*["a"] * 8) for _ in range(8)]  # the pool scores answers without a break for three time limits
    scored(pool_of(score, timeout_s=timeout_s, on_hang=hung.append, concurrency=1), *groups)
    assert not hung


def test_answers_that_all_hang_are_told_once_within_two_time_limits() -> None:
    told: list[tuple[float, Exception]] = []
    go_on = threading.Event()

    def score(given: RewardInput, config: Any) -> float:
        assert go_on.wait(LONG_S)
        return 1.0

    def on_hang(error: Exception) -> None:
        told.append((time.monotonic() - began, error))
        threading.Timer(0.5, go_on.set).start()

    began = time.monotonic()
    (outputs,) = scored(pool_of(score, timeout_s=1.2, on_hang=on_hang), group_of(*["a"] * 8))
    assert len(told) == 1 and len(outputs) == 8
    assert told[0][0] < 5 and "reward mine" in str(told[0][1]) and "reward.timeout_s=1.2" in str(told[0][1])


def test_answers_that_wait_for_each_other_hang_not() -> None:
    told: list[Exception] = []
    turn = threading.Lock()

    def score(given: RewardInput, config: Any) -> float:
        with turn:  # like a server that answers one request at a time
            time.sleep(0.3)
        return 1.0

    scored(pool_of(score, timeout_s=1.0, on_hang=told.append), group_of(*["a"] * 8))
    assert not told


def test_each_answer_of_a_call_has_its_own_time_limit() -> None:
    told: list[Exception] = []
    go_on = threading.Event()

    def score(given: RewardInput, config: Any) -> float:
        if given.response == "hang":
            assert go_on.wait(LONG_S)
        return 1.0

    def on_hang(error: Exception) -> None:
        told.append(error)
        go_on.set()

    pool = pool_of(score, timeout_s=0.3, on_hang=on_hang)
    began = time.monotonic()
    scored(pool, group_of(*["a"] * 199, "hang"))
    assert len(told) == 1 and time.monotonic() - began < 20


class Stop(BaseException):
    """A plug-in's exception that is not derived from Exception."""


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (lambda: sys.exit(3), "SystemExit(3)"),
        (lambda: (_ for _ in ()).throw(KeyboardInterrupt()), "KeyboardInterrupt"),
        (lambda: (_ for _ in ()).throw(Stop("enough")), "Stop('enough')"),
        (lambda: (_ for _ in ()).throw(asyncio.CancelledError()), "CancelledError"),
        (lambda: (_ for _ in ()).throw(BaseExceptionGroup("several", [Stop()])), "BaseExceptionGroup"),
        (lambda: os._exit(3), "os._exit(3)"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "async", "group"])
def test_what_would_end_a_thread_is_no_reward_and_counts_as_an_error(stop: Any, message: str, kind: str) -> None:
    def score(given: RewardInput, config: Any) -> float:
        if given.response == "stop":
            stop()
        return 1.0

    async def score_async(given: RewardInput, config: Any) -> float:
        await asyncio.sleep(0)
        return score(given, config)

    def score_group(given: Sequence[RewardInput], config: Any) -> list[float]:
        return [score(reward_input, config) for reward_input in given]

    function = {"plain": score, "async": score_async, "group": score_group}[kind]
    with ThreadPoolExecutor(1) as rollout:  # as in a run, not in the main thread: that may get KeyboardInterrupt
        pool = pool_of(function, group=kind == "group")
        (outputs,) = rollout.submit(scored, pool, group_of("stop", "go")).result()
    assert outputs[0].reward is None and message in outputs[0].reason and outputs[0].cause == "raised"
    assert kind == "group" or outputs[1].reward == 1.0


def test_a_cancelled_call_of_an_async_reward_stays_cancelled() -> None:
    async def score(given: RewardInput, config: Any) -> float:
        await asyncio.sleep(LONG_S)
        return 1.0

    async def cancelled(pool: RewardPool) -> None:
        task = asyncio.create_task(pool.score(group_of("a")))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with pool_of(score) as pool:
        asyncio.run(cancelled(pool))


@pytest.mark.parametrize("kind", ["plain", "async", "group"])
def test_each_call_gets_a_row_of_its_own(kind: str) -> None:
    def score(given: RewardInput, config: Any) -> float:
        row: Any = given.row
        row["prompt"].append(given.response)
        row["extra"]["deep"][0]["n"] += 1
        row["new"] = 1
        return float(len(row["prompt"]) + row["extra"]["deep"][0]["n"] + len(row))

    async def score_async(given: RewardInput, config: Any) -> float:
        return score(given, config)

    def score_group(given: Sequence[RewardInput], config: Any) -> list[float]:
        return [score(reward_input, config) for reward_input in given]

    function = {"plain": score, "async": score_async, "group": score_group}[kind]
    media = MediaSource(kind="image", data=b"bytes")
    row = {"prompt": ["question"], "extra": {"deep": ({"n": 1}, media)}}
    inputs = [RewardInput(response=text, stopped=True, answer="a", row=row) for text in "abcd"]
    (outputs,) = scored(pool_of(function, group=kind == "group"), inputs)
    assert rewards(outputs) == [7.0] * 4
    assert row == {"prompt": ["question"], "extra": {"deep": ({"n": 1}, media)}} and row["extra"]["deep"][1] is media


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_of_whole_groups_gets_each_at_once(is_async: bool) -> None:
    def score(given: Sequence[RewardInput], config: Any) -> list[float]:
        return [len(given) + 0.1 * float(reward_input.response) for reward_input in given]

    async def score_async(given: Sequence[RewardInput], config: Any) -> list[float]:
        return score(given, config)

    pool = pool_of(score_async if is_async else score, group=True)
    assert [rewards(outputs) for outputs in scored(pool, group_of("1", "2"), group_of("3"))] == [[2.1, 2.2], [1.3]]


def test_an_isolated_reward_of_whole_groups_has_a_deadline_for_the_group(tmp_path: Path) -> None:
    path = tmp_path / "groups.py"
    path.write_text(
        """
import time
from relax_core.contracts.reward import RewardConfig, RewardSpec

def score_group(given, config):
    time.sleep(600 if given[0].response == "hang" else 0)
    return [len(given) for one in given]

SPEC = RewardSpec(name="groups", summary="s", config=RewardConfig, score_group=score_group, isolated=True)
"""
    )
    spec = find_reward(str(path))
    with RewardPool(spec, spec.config(name=str(path), timeout_s=0.5), workers=1) as pool:
        hung = asyncio.run(pool.score(group_of("hang", "hang")))
        assert rewards(hung) == [None, None] and "no answer within 1 s" in hung[1].reason
        give_up = time.monotonic() + LONG_S
        while rewards(asyncio.run(pool.score(group_of("a", "b")))) != [2.0, 2.0]:  # a slow machine may need a second
            assert time.monotonic() < give_up


def test_a_list_of_the_wrong_length_is_no_reward_and_ends_it_with_sample_and_row() -> None:
    def score(given: Sequence[RewardInput], config: Any) -> list[float]:
        return [1.0]

    async def score_all() -> None:
        for number in range(8):
            where = f"rows.jsonl, line {number + 1}"
            row = {"number": number}
            await pool.score(
                [
                    RewardInput(response="r", stopped=True, answer="", row=row, uid=f"g{number}-{k}", where=where)
                    for k in "01"
                ]
            )

    message = (
        r"score returned \[1.0\] of type list. Wanted: a list of 2 rewards, .*; 1 came.*sample g0-0, rows.jsonl, line 1"
    )
    with pool_of(score, group=True) as pool, pytest.raises(RewardsFailed, match=message):
        asyncio.run(score_all())


def test_what_a_spec_may_not_be_is_refused_with_its_name() -> None:
    async def score_async(given: RewardInput, config: Any) -> float:
        return 1.0

    def score(given: RewardInput, config: Any) -> float:
        return 1.0

    def score_group(given: Sequence[RewardInput], config: Any) -> list[float]:
        return [1.0 for _ in given]

    named: dict[str, Any] = {"name": "mine", "summary": "s", "config": RewardConfig}
    with pytest.raises(ValueError, match="reward mine: its SPEC has none of score, score_group and combine"):
        RewardSpec(**named)
    with pytest.raises(ValueError, match="reward mine: its SPEC has both score and score_group"):
        RewardSpec(**named, score=score, score_group=score_group)
    with pytest.raises(ValueError, match=r"reward mine: .*isolated=True and an async function.*drop isolated"):
        RewardSpec(**named, score=score_async, isolated=True)
