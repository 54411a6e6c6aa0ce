"""Measures the cost of rewards: ``python -m benchmarks.rewards [--rounds 3]``.

1. Answers per second of 8 groups of 16 answers with a reward that waits 50 ms per answer: sequentially, in threads, and
   as an async function.
2. Microseconds per group of 16 answers with the demo's reward: in the event loop, and in a thread for each group.
3. Answers per second of reward=math in two warm worker processes, with and without the sandbox, and the seconds from
   the start of a pool to its first reward.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import Comparison, Metrics, command_line, machine, take_turns, write_report
from relax_core.config.compose import load_config
from relax_core.contracts.checked_plugins import checked_reward
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardSpec
from relax_core.preflight import settle
from relax_core.registry import find_reward
from relax_core.rollout.rewards import reward_pool
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.sandbox.worker_sandbox import worker_refusal

GROUPS, GROUP_SIZE, REWARD_S = 8, 16, 0.05
QUICK_GROUPS, MATH_GROUPS = 2000, 200


def waits(given: RewardInput, config: Any) -> float:
    time.sleep(REWARD_S)
    return len(given.response) / 10


async def waits_async(given: RewardInput, config: Any) -> float:
    await asyncio.sleep(REWARD_S)
    return len(given.response) / 10


async def scored(rewards: RewardPool, group: Sequence[RewardInput], *, groups: int) -> float:
    """Returns the seconds to score ``groups`` groups that arrive at the same time."""
    began = time.perf_counter()
    await asyncio.gather(*(rewards.score(group) for _ in range(groups)))
    return time.perf_counter() - began


def slow_rewards(*, rounds: int) -> Comparison:
    group = [RewardInput(response=str(n), stopped=True, answer="", row={}) for n in range(GROUP_SIZE)]

    def way(score: Callable[..., Any], concurrency: int) -> Callable[[int], Metrics]:
        def measure(number: int) -> Metrics:
            spec = checked_reward(RewardSpec(name="slow", summary="waits", config=RewardConfig, score=score))
            with RewardPool(spec, RewardConfig(name="slow"), workers=1, concurrency=concurrency) as rewards:
                return {"answers/s": GROUPS * GROUP_SIZE / asyncio.run(scored(rewards, group, groups=GROUPS))}

        return measure

    ways = {
        "one after the other": way(waits, 1),
        "32 threads": way(waits, 32),
        "64 threads (default)": way(waits, 64),
        "async, 64 calls (default)": way(waits_async, 64),
        "async, 128 calls": way(waits_async, 128),
    }
    return take_turns("a reward of 50 ms", ways, rounds=rounds)


@contextmanager
def in_loop_below(seconds: float) -> Iterator[None]:
    usual, reward_pool.IN_LOOP_S = reward_pool.IN_LOOP_S, seconds
    try:
        yield
    finally:
        reward_pool.IN_LOOP_S = usual


def quick_reward(*, rounds: int) -> Comparison:
    name = load_config(settle=settle).reward.name
    spec = find_reward(name)
    group = [RewardInput(response=f"1{n}3", stopped=True, answer="321", row={}) for n in range(GROUP_SIZE)]

    async def one_by_one(rewards: RewardPool) -> float:
        for _ in range(QUICK_GROUPS):  # the pool measures the reward's speed first
            await rewards.score(group)
        began = time.perf_counter()
        for _ in range(QUICK_GROUPS):
            await rewards.score(group)
        return time.perf_counter() - began

    def way(seconds: float) -> Callable[[int], Metrics]:
        def measure(number: int) -> Metrics:
            config = spec.config(name=name)
            with in_loop_below(seconds), RewardPool(spec, config, workers=1, concurrency=32) as rewards:
                return {"µs a group": 1e6 * asyncio.run(one_by_one(rewards)) / QUICK_GROUPS}

        return measure

    ways = {"in the event loop (default)": way(reward_pool.IN_LOOP_S), "a thread for a group": way(0.0)}
    return take_turns(f"reward={name}", ways, rounds=rounds)


def isolated_math(*, rounds: int) -> Comparison:
    if refusal := worker_refusal():
        sys.exit(refusal)
    spec = find_reward("math")
    answers = [f"So the answer is $\\boxed{{\\frac{{{n}}}{{2}}}}$." for n in range(GROUP_SIZE)]
    group = [RewardInput(response=text, stopped=True, answer="21/2", row={}) for text in answers]

    def way(sandbox: str) -> Callable[[int], Metrics]:
        def measure(number: int) -> Metrics:
            began = time.perf_counter()
            with RewardPool(spec, spec.config(name="math", sandbox=sandbox), workers=2) as rewards:
                asyncio.run(scored(rewards, group, groups=1))
                start_s = time.perf_counter() - began
                asyncio.run(scored(rewards, group, groups=MATH_GROUPS))  # warms up both workers
                seconds = asyncio.run(scored(rewards, group, groups=MATH_GROUPS))
            return {"answers/s": MATH_GROUPS * GROUP_SIZE / seconds, "start, s": start_s}

        return measure

    ways = {"plain": way("none"), "sandbox": way("auto")}
    return take_turns("reward=math in worker processes", ways, rounds=rounds, warm_up=False)


def main() -> int:
    given = command_line(__doc__).parse_args()
    print(machine(), flush=True)
    slow = slow_rewards(rounds=given.rounds)
    print(slow.table(base="one after the other", ratio_of=["answers/s"]), flush=True)
    quick = quick_reward(rounds=given.rounds)
    print(quick.table(), flush=True)
    isolated = isolated_math(rounds=given.rounds)
    print(isolated.table(base="plain", ratio_of=["answers/s"]))
    write_report(given.json, slow, quick, isolated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
