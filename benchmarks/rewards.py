"""What a slow reward costs the rollout: ``python -m benchmarks.rewards``.

The real rollout and an embedded engine, with a bus that lets in the next step's prompts as soon as it has the groups of
the last one; there is no trainer. Four tables:

1. Samples a second of steps of 8 groups of 16 answers, where the reward of each answer waits for 50 ms. The ways take
   turns within each round, and the ratio is to the first of them: in the event loop, one answer after the other.
2. When eight groups of one answer, whose responses come together, are on the bus: an isolated reward of 0.3 s in eight
   worker processes, in seconds after the first of them was given to the reward.
3. Microseconds a group of 16 answers takes with the demo's own reward, in the event loop and with a thread a group.
4. Answers a second of reward=math in two warm worker processes, plain ones and in the sandbox by turns, the median of
   the rounds' ratios, and the seconds from the start of a pool to its first reward. ``--isolated`` shows it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.tiny_model import engine_config
from relax_core.config.compose import load_config
from relax_core.contracts.bus import Admission, BusClosed, CompleteGroup
from relax_core.contracts.checks.checked import checked_reward
from relax_core.contracts.engine import SamplingParams
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec
from relax_core.contracts.tree import group_uid
from relax_core.data.sources import make_source
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.pool.engine_pool import EnginePool
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.preflight import settle
from relax_core.registry import find_env, find_reward
from relax_core.rollout.bad_rows import BadRows
from relax_core.rollout.prompt_admissions import RolloutLoopSettings
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards import reward_pool
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.rollout_loop import RolloutLoop
from relax_core.sandbox.worker_sandbox import worker_refusal
from relax_core.tools.make_tiny import tiny_model_folder

GROUPS, GROUP_SIZE = 8, 16
REWARD_S, ISOLATED_REWARD_S = 0.05, 0.3
TOKEN = "token-of-the-benchmark"
TIMEOUT_S = 600.0
ISOLATED = f"""
import time
from relax_core.contracts.reward import RewardConfig, RewardSpec

def score(given, config):
    time.sleep({ISOLATED_REWARD_S} if given.uid else 0)  # not for the answer with which the workers start
    return len(given.response) / 10

SPEC = RewardSpec(name="slow", summary="waits", config=RewardConfig, score=score, isolated=True)
"""


class StepAfterStep:
    """A bus that admits a step's groups when it has those of the step before. ``put_s``: when each group came."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self._next = 0
        self._changed = asyncio.Event()
        self.put_s: list[float] = []

    async def admit_async(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        while len(self.put_s) < self._next:
            self._changed.clear()
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        if not self._left:
            raise BusClosed("all steps are done")
        self._left -= 1
        first, self._next = self._next, self._next + GROUPS
        return [Admission(index=n, group_uid=group_uid(n), min_version=0) for n in range(first, self._next)]

    async def put_async(self, rows: Sequence[CompleteGroup], *, timeout_s: float) -> None:
        self.put_s += [time.perf_counter()] * len(rows)
        self._changed.set()

    async def name_modalities_async(self, modalities: Mapping[int, str], *, timeout_s: float) -> None:
        raise AssertionError("a run on text names no modality")

    async def drop_async(self, group_uid: str, *, reason: str, timeout_s: float) -> None:
        raise AssertionError(f"{group_uid} was dropped: {reason}")


class InTheLoop(RewardPool):
    """Every answer in the event loop, one after the other."""

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardOutput]:
        own = self._choice.own
        assert own.spec.score is not None
        return [own.spec.score(given, own.config) for given in inputs]  # type: ignore[misc]


class Traced(RewardPool):
    """``first_s``: when the first group was given to it."""

    first_s = 0.0

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardOutput]:
        self.first_s = self.first_s or time.perf_counter()
        return await super().score(inputs)


def waits(given: RewardInput, config: Any) -> float:
    time.sleep(REWARD_S)
    return len(given.response) / 10


async def waits_async(given: RewardInput, config: Any) -> float:
    await asyncio.sleep(REWARD_S)
    return len(given.response) / 10


def pool_of(score: Callable[..., Any], *, of: type[RewardPool] = RewardPool, concurrency: int) -> RewardPool:
    spec = checked_reward(RewardSpec(name="slow", summary="waits", config=RewardConfig, score=score))
    return of(spec, RewardConfig(name="slow"), workers=1, concurrency=concurrency)


WAYS: Mapping[str, Callable[[], RewardPool]] = {
    "in the event loop": lambda: pool_of(waits, of=InTheLoop, concurrency=1),
    "32 threads": lambda: pool_of(waits, concurrency=32),
    "64 threads (default)": lambda: pool_of(waits, concurrency=64),
    "async, 64 calls (default)": lambda: pool_of(waits_async, concurrency=64),
    "async, 128 calls": lambda: pool_of(waits_async, concurrency=128),
}


async def roll_out(url: str, folder: Path, rewards: RewardPool, *, steps: int, group_size: int) -> StepAfterStep:
    """So many steps of the rollout."""
    config = load_config(settle=settle)
    client = EngineClient(url, TOKEN, request_timeout_s=TIMEOUT_S, control_timeout_s=TIMEOUT_S)
    bus = StepAfterStep(steps)
    tokenizer = PromptTokenizer(folder)
    source = make_source(config.data, seed=0, eval_rows=0)

    async def client_for(engine: int, on_policy: bool) -> EngineClient:
        return client

    async def no_gate(version: int) -> None: ...

    sampler = RolloutLoop(
        bus=bus,
        pool=EnginePool(1, client_for, timeout_s=TIMEOUT_S),
        source=source,
        prompts=PromptMaker(
            env=find_env(config.env.name),
            env_config=config.env,
            tokenizer=tokenizer,
            max_prompt_tokens=config.engine.context_tokens,
        ),
        rewards=rewards,
        settings=RolloutLoopSettings(
            seed=0,
            batch_prompts=GROUPS,
            sampling=SamplingParams(n=group_size, max_new_tokens=8, stop_token_ids=tokenizer.stop_token_ids),
            admit_timeout_s=TIMEOUT_S,
            call_timeout_s=TIMEOUT_S,
            max_failed_groups=GROUPS,
        ),
        record=lambda source, step, values: None,
        gate=no_gate,
        bad_rows=BadRows(rows=len(source), most=0.0, report=lambda rows: None),
    )
    try:
        await sampler.run([])
    except BusClosed:
        await client.aclose()
    return bus


def slow_rewards(url: str, folder: Path, *, rounds: int, steps: int) -> None:
    """The first table."""
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for round_ in range(rounds + 1):
        for name, make in WAYS.items():
            with make() as rewards:
                began = time.perf_counter()
                asyncio.run(roll_out(url, folder, rewards, steps=steps if round_ else 1, group_size=GROUP_SIZE))
                if round_:  # the first round warms up
                    rates[name].append(steps * GROUPS * GROUP_SIZE / (time.perf_counter() - began))
    base = statistics.median(rates["in the event loop"])
    print(f"\n{'reward of 50 ms an answer':28}{'samples/s':>10}{'ratio':>8}   rounds")
    for name, of_rounds in rates.items():
        rate = statistics.median(of_rounds)
        print(f"{name:28}{rate:10.1f}{rate / base:7.1f}×   {', '.join(f'{one:.1f}' for one in of_rounds)}", flush=True)


def eight_groups(url: str, folder: Path, scratch: Path, *, rounds: int) -> None:
    """The second table."""
    path = scratch / "slow.py"
    path.write_text(ISOLATED)
    spec = find_reward(str(path))
    warm = [RewardInput(response="a", stopped=True, answer="a", row={})] * GROUPS
    print("\neight groups at once, isolated reward of 0.3 s in 8 workers: seconds until each is on the bus")
    for _ in range(rounds):
        with Traced(spec, RewardConfig(name=str(path), timeout_s=60.0), workers=GROUPS) as rewards:
            asyncio.run(RewardPool.score(rewards, warm))  # all eight processes have started
            bus = asyncio.run(roll_out(url, folder, rewards, steps=1, group_size=1))
        print("  " + ", ".join(f"{at - rewards.first_s:.2f}" for at in bus.put_s), flush=True)


def quick_reward(*, groups: int) -> None:
    """The third table."""
    name = load_config(settle=settle).reward.name
    spec = find_reward(name)
    group = [RewardInput(response=f"1{n}3", stopped=True, answer="321", row={}) for n in range(GROUP_SIZE)]

    async def score_groups(rewards: RewardPool) -> float:
        for _ in range(groups):  # until it is known how quick the reward is
            await rewards.score(group)
        began = time.perf_counter()
        for _ in range(groups):
            await rewards.score(group)
        return 1e6 * (time.perf_counter() - began) / groups

    print(f"\nreward={name}: µs a group of {GROUP_SIZE}")
    usual = reward_pool.IN_LOOP_S
    for way, in_loop_s in {"in the event loop (default)": usual, "a thread a group": 0.0}.items():
        reward_pool.IN_LOOP_S = in_loop_s
        with RewardPool(spec, spec.config(name=name), workers=1, concurrency=32) as rewards:
            print(f"{way:28}{asyncio.run(score_groups(rewards)):10.0f}", flush=True)
    reward_pool.IN_LOOP_S = usual


def isolated_math(*, rounds: int, groups: int) -> None:
    """The fourth table."""
    spec = find_reward("math")
    answers = [f"So the answer is $\\boxed{{\\frac{{{n}}}{{2}}}}$." for n in range(GROUP_SIZE)]
    group = [RewardInput(response=text, stopped=True, answer="21/2", row={}) for text in answers]
    rates: dict[str, list[float]] = {"none": [], "auto": []}
    starts: dict[str, list[float]] = {"none": [], "auto": []}
    if refusal := worker_refusal():
        raise SystemExit(refusal)

    async def scored(rewards: RewardPool, count: int) -> None:
        await asyncio.gather(*(rewards.score(group) for _ in range(count)))

    pools = {}
    for sandbox in rates:
        for _ in range(rounds):
            began = time.perf_counter()
            with RewardPool(spec, spec.config(name="math", sandbox=sandbox), workers=1) as rewards:
                asyncio.run(scored(rewards, 1))
                starts[sandbox].append(time.perf_counter() - began)
        pools[sandbox] = RewardPool(spec, spec.config(name="math", sandbox=sandbox), workers=2)
        asyncio.run(scored(pools[sandbox], groups))
    for round_ in range(rounds):
        for sandbox in sorted(rates, reverse=bool(round_ % 2)):
            began = time.perf_counter()
            asyncio.run(scored(pools[sandbox], groups))
            rates[sandbox].append(groups * GROUP_SIZE / (time.perf_counter() - began))
    for rewards in pools.values():
        rewards.close()
    print(f"\nreward=math, two warm workers: answers/s in {rounds} rounds, and seconds to the first group")
    for sandbox, of_rounds in rates.items():
        shown = ", ".join(f"{one:.0f}" for one in of_rounds)
        start = statistics.median(starts[sandbox])
        print(f"reward.sandbox={sandbox:5} {statistics.median(of_rounds):8.0f}   start {start:.2f} s   {shown}")
    ratios = [own / plain for own, plain in zip(rates["auto"], rates["none"], strict=True)]
    print(f"in the sandbox over plain: {statistics.median(ratios):.2f}×   {', '.join(f'{one:.2f}' for one in ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps of each way in a round")
    parser.add_argument("--isolated", action="store_true", help="the fourth table alone")
    arguments = parser.parse_args()
    if arguments.isolated:
        isolated_math(rounds=arguments.rounds, groups=200)
        return
    folder = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    with tempfile.TemporaryDirectory(prefix="relax-rewards-") as temporary:
        scratch = Path(temporary)
        (scratch / "token").write_text(TOKEN)
        process = EngineProcess.start(
            EngineLaunch(
                model_folder=folder,
                engine=replace(engine_config(), context_length=1024),
                dtype="float32",
                token_file=scratch / "token",
                log_file=scratch / "engine.log",
                load_weights=True,
            )
        )
        try:
            slow_rewards(process.url, folder, rounds=arguments.rounds, steps=arguments.steps)
            eight_groups(process.url, folder, scratch, rounds=arguments.rounds)
        finally:
            process.stop(timeout_s=5.0)
    quick_reward(groups=2000)
    isolated_math(rounds=arguments.rounds, groups=200)


if __name__ == "__main__":
    main()
