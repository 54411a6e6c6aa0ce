"""Measures what hanging rewards, judges and the endpoint cost, for `benchmarks.agents` without ``--learn``.

"hanging scorer": the real rollout over the bus's state machine and an embedded engine, 8 groups of 16 answers a step,
asynchronous with a staleness of 2, beside a trainer whose step takes `STEP_S`. For 1% of the answers the reward does
not end by itself, and its deadline is 1 s: as an ``async def`` function, and in 4 worker processes that are killed.
Counted are the answers with a reward that are trained in a second, over a reward of which no answer hangs.

"warm worker": an agent that imports ``openai`` (benchmarks/openai_agent.py, three requests an episode, whose answers
come at once), with two episodes at one time: two processes that take task after task, over a process an episode. The
first two tasks start the processes and do not count.

The other figures are those of `benchmarks.judge_times` and `benchmarks.endpoint_times`. All ways take turns within an
invocation.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from benchmarks.endpoint_times import AtOnce, Client, Sessions, endpoint, request_cpu, stream, with_sessions
from benchmarks.judge_times import judge
from benchmarks.over_sampling import GROUPS, TIMEOUT_S, TOKEN, StepAtOnce, no_gate, rename_weights
from benchmarks.tiny_model import engine_config
from relax_core.bus.state.settings import BusSettings
from relax_core.config.compose import load_config
from relax_core.contracts import columns as c
from relax_core.contracts.bus import BusClosed, CompleteGroup, LeaseRequest
from relax_core.contracts.checks.checked import checked_reward
from relax_core.contracts.engine import SamplingParams
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardSpec
from relax_core.data.sources import make_source
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.pool.engine_pool import EnginePool
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.preflight import settle
from relax_core.registry import find_env, find_reward
from relax_core.rollout.agent_processes.agent_runs import AgentRuns
from relax_core.rollout.agent_processes.agent_tasks import AgentTask
from relax_core.rollout.agent_processes.agent_workers import AgentWorkers
from relax_core.rollout.bad_rows import BadRows
from relax_core.rollout.prompt_admissions import RolloutLoopSettings
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.rollout_loop import RolloutLoop
from relax_core.rollout.weight_update_handler import WeightUpdateHandler
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.tools.tiny_tokenizer import tiny_prompt_tokenizer

STEP_S, DEADLINE_S, HANGS_S, WORKERS = 1.0, 1.0, 600.0, 4
STALENESS, GROUP_SIZE = 2, 16
AT_ONCE, EPISODES = 2, 16  # of agents
IN_FLIGHT = STALENESS + 2  # steps whose groups are in flight, admission being a step ahead
ISOLATED = f"""
import time
import zlib
from relax_core.contracts.reward import RewardConfig, RewardSpec

def score(given, config):
    if zlib.crc32(given.uid.encode()) % 100 == 0:  # as `is_held`, whose module a process would import for seconds
        time.sleep({HANGS_S})
    return len(given.response) / 10

SPEC = RewardSpec(name="hangs", summary="hangs for some answers", config=RewardConfig, score=score, isolated=True)
"""


def is_held(given: RewardInput) -> bool:
    """Returns whether this answer is one of the hundred that hangs."""
    return zlib.crc32(given.uid.encode()) % 100 == 0


class PacedBus(StepAtOnce):
    """Is the bus with a trainer whose step takes a time. ``ends`` has the end of each step, ``samples`` what it had."""

    def __init__(self, settings: BusSettings, url: str) -> None:
        super().__init__(settings, url)
        self._engine = url
        self._rewarded: dict[str, int] = {}
        self.ends: list[float] = []
        self.samples: list[int] = []

    async def put_async(self, rows: Sequence[CompleteGroup], *, timeout_s: float) -> None:
        """Takes groups, and counts their answers that have a reward."""
        self.core.put(rows)
        for row in rows:
            episodes = c.decode_episodes(row.columns[c.EPISODES])
            self._rewarded[row.group_uid] = sum(one.reward is not None for one in episodes)
        self._changed.set()

    async def train(self, steps: int) -> None:
        """Takes so many steps."""
        while len(self.ends) < steps:
            step = self.core.version
            request = LeaseRequest(task="actor", columns=(c.EPISODES,), min_groups=GROUPS, max_groups=GROUPS, step=step)
            lease = self.core.lease(request)
            if lease is None:
                await self._change(TIMEOUT_S)
                continue
            await asyncio.sleep(STEP_S)
            await asyncio.to_thread(rename_weights, self._engine, step + 1)
            self.core.ack([lease.lease_id], step=step, dropped={})
            self.ends.append(time.monotonic())
            self.samples.append(sum(self._rewarded[row.group_uid] for row in lease.rows))
            self._changed.set()

    def rate(self) -> float:
        """Returns the samples a second, without the steps that were in flight at the start."""
        first = IN_FLIGHT - 1
        return sum(self.samples[first + 1 :]) / (self.ends[-1] - self.ends[first])


def in_process(*, hangs: bool) -> RewardPool:
    """Returns a pool with an async reward."""

    async def score(given: RewardInput, config: Any) -> float:
        if hangs and is_held(given):
            await asyncio.sleep(HANGS_S)
        return len(given.response) / 10

    spec = checked_reward(RewardSpec(name="hangs", summary="waits", config=RewardConfig, score=score))
    return RewardPool(spec, RewardConfig(name="hangs", timeout_s=DEADLINE_S), workers=1, concurrency=64)


def in_workers(folder: Path, *, hangs: bool) -> RewardPool:
    """Returns a pool whose reward is in worker processes."""
    path = folder / f"hangs_{hangs}.py"
    path.write_text(ISOLATED if hangs else ISOLATED.replace("% 100 == 0", "< 0"))
    spec = find_reward(str(path))
    config = RewardConfig(name=str(path), timeout_s=DEADLINE_S)
    pool = RewardPool(spec, config, workers=WORKERS)
    warm = [RewardInput(response="a", stopped=True, answer="a", row={}, uid="warm")] * WORKERS
    asyncio.run(pool.score(warm))  # all processes have started
    return pool


def hanging_scorer(*, rounds: int, steps: int) -> float:
    """Prints samples/s with and without hanging answers; returns the smaller ratio."""
    folder = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    with tempfile.TemporaryDirectory(prefix="relax-agents-") as temporary:
        scratch = Path(temporary)
        ways: Mapping[str, Callable[[], RewardPool]] = {
            "async, none hangs": lambda: in_process(hangs=False),
            "async, 1% hang": lambda: in_process(hangs=True),
            f"{WORKERS} workers, none hangs": lambda: in_workers(scratch, hangs=False),
            f"{WORKERS} workers, 1% hang": lambda: in_workers(scratch, hangs=True),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, make in ways.items():
                process = _engine(folder, scratch)
                try:
                    with make() as rewards:
                        bus = asyncio.run(_rolled_out(process.url, folder, rewards, steps=IN_FLIGHT + steps))
                finally:
                    process.stop(timeout_s=5.0)
                rates[name].append(bus.rate())
                print(f"  {name}: {rates[name][-1]:.1f} samples/s", flush=True)
    names, ratios = list(ways), []
    for plain, hung in zip(names[::2], names[1::2], strict=True):
        own = [after / before for before, after in zip(rates[plain], rates[hung], strict=True)]
        ratios.append(median(own))
        print(
            f"  {hung}: {fmean(rates[hung]):.1f} samples/s, {fmean(rates[plain]):.1f} without; "
            f"ratio {ratios[-1]:.2f} ({', '.join(f'{one:.2f}' for one in own)})",
            flush=True,
        )
    return min(ratios)


def _engine(folder: Path, scratch: Path) -> EngineProcess:
    (scratch / "token").write_text(TOKEN)
    return EngineProcess.start(
        EngineLaunch(
            model_folder=folder,
            engine=replace(engine_config(), max_running_samples=1024),
            dtype="float32",
            token_file=scratch / "token",
            log_file=scratch / "engine.log",
            load_weights=True,
        )
    )


async def _rolled_out(url: str, folder: Path, rewards: RewardPool, *, steps: int) -> PacedBus:
    """Returns the bus after so many train steps of a rollout."""
    given = {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "on_stale": "drop", "max_staleness": STALENESS}
    given |= {"total_steps": 10**6, "inline_bytes": 1 << 20, "max_row_bytes": 1 << 24}
    bus = PacedBus(msgspec.convert(given, BusSettings), url)
    client = EngineClient(url, TOKEN, request_timeout_s=TIMEOUT_S, control_timeout_s=TIMEOUT_S)

    async def client_for(engine: int, on_policy: bool) -> EngineClient:
        return client

    pool = EnginePool(1, client_for, timeout_s=TIMEOUT_S)
    running = asyncio.create_task(_loop(bus, pool, rewards, folder).run([]))
    training = asyncio.create_task(bus.train(steps))
    try:
        await asyncio.wait([running, training], return_when=asyncio.FIRST_COMPLETED, timeout=TIMEOUT_S)
        if running.done():
            running.result()
        training.result()
    finally:
        for task in (running, training):
            task.cancel()
            with suppress(asyncio.CancelledError, BusClosed):
                await task
        await client.aclose()
    return bus


def _loop(bus: PacedBus, pool: EnginePool, rewards: RewardPool, folder: Path) -> RolloutLoop:
    config, tokenizer = load_config(settle=settle), PromptTokenizer(folder)
    source = make_source(config.data, seed=0, eval_rows=0)
    return RolloutLoop(
        bus=bus,
        pool=pool,
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
            sampling=SamplingParams(n=GROUP_SIZE, max_new_tokens=8, stop_token_ids=tokenizer.stop_token_ids),
            admit_timeout_s=TIMEOUT_S,
            call_timeout_s=TIMEOUT_S,
            max_failed_groups=GROUPS,
        ),
        record=lambda source, step, values: None,
        gate=no_gate,
        bad_rows=BadRows(rows=len(source), most=0.0, report=lambda rows: None),
        weight_update_handler=WeightUpdateHandler(bus, pool, max_aborts=0, call_timeout_s=TIMEOUT_S),
    )


def warm_worker(*, rounds: int) -> float:
    """Prints and returns episodes/s of warm agents over those of a process an episode."""
    tokenizer = tiny_prompt_tokenizer(tools=True)
    command = [sys.executable, str(Path(__file__).with_name("openai_agent.py")), "guess"]
    settings = load_config(settle=settle).agent
    rates: dict[str, list[float]] = {"a process an episode": [], "warm": []}

    async def play(own: Sessions, way: str, folder: Path) -> None:
        agent = replace(settings, workers=AT_ONCE if way == "warm" else 0)
        make = AgentWorkers if agent.workers else AgentRuns
        runner = make(command, agent, folder=folder / way.replace(" ", "-"))
        free = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            row = {"prompt": "", "answer": "", "seed": number}
            key, uid = own.keys[number], own.records[number].uid
            async with free:
                result = await runner.play(
                    AgentTask(uid=uid, attempt=0, row=row, key=key, base_url=own.url, evaluation=False)
                )
            assert not result.failed, result

        try:
            await asyncio.gather(*map(one, range(AT_ONCE)))
            began = time.monotonic()
            await asyncio.gather(*map(one, range(AT_ONCE, AT_ONCE + EPISODES)))
            rates[way].append(EPISODES / (time.monotonic() - began))
        finally:
            await runner.aclose()

    with tempfile.TemporaryDirectory(prefix="relax-agents-") as scratch:
        for number in range(rounds):
            for way in rates:
                scene = partial(play, way=way, folder=Path(scratch) / str(number))
                count = AT_ONCE + EPISODES
                asyncio.run(
                    with_sessions(tokenizer, AtOnce(tokenizer), scene, count=count, turn_tokens=64, context=1024)
                )
    plain, warm = rates.values()
    ratios = [after / before for before, after in zip(plain, warm, strict=True)]
    print(
        f"  warm: {fmean(warm):.2f} episodes/s, a process an episode: {fmean(plain):.2f}; "
        f"ratio {median(ratios):.1f} ({', '.join(f'{one:.1f}' for one in ratios)})",
        flush=True,
    )
    return median(ratios)


HANGING, JUDGE, ENDPOINT, REQUEST, STREAM = "hanging scorer", "judge", "endpoint", "request CPU", "stream"
WARM = "warm worker"
FIGURES = (HANGING, JUDGE, ENDPOINT, REQUEST, STREAM, WARM)


def measure(names: Sequence[str], *, rounds: int, steps: int) -> int:
    """Prints the figures with these names, and which miss their reach; returns 1 if one does."""
    logging.getLogger("relax_core").setLevel(logging.ERROR)  # each answer that hangs would be told
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    missed = []
    client = Client() if {ENDPOINT, REQUEST, STREAM} & set(names) else None
    try:
        for name in names:
            print(f"{name}:", flush=True)
            missed += [f"{name}: {words}" for words in _missed(name, client, rounds=rounds, steps=steps)]
    finally:
        if client is not None:
            client.close()
    print(f"load {os.getloadavg()[0]:.1f}")
    print("missed: " + "; ".join(missed) if missed else "every figure is within its reach")
    return 1 if missed else 0


def _missed(name: str, client: Client | None, *, rounds: int, steps: int) -> list[str]:
    """Returns what of a figure is not within its reach."""
    if name == HANGING:
        return _short("samples/s", hanging_scorer(rounds=rounds, steps=steps), least=0.9)
    if name == JUDGE:
        return _short("samples/s", judge(rounds=rounds, steps=steps), least=0.8)
    if name == WARM:
        return _short("episodes/s", warm_worker(rounds=rounds), least=3.0)
    assert client is not None
    if name == ENDPOINT:
        speed, prefill = endpoint(client, rounds=rounds)
        return [*_short("episodes/s", speed, least=0.6), *_short("prefilled tokens", prefill, most=1.02)]
    if name == REQUEST:
        plain, long = request_cpu(client, rounds=rounds)
        return [*_short("ms", plain, most=2.0), *_short("ms with tools and history", long, most=4.0)]
    return _short("ms", stream(client, rounds=rounds), most=10.0)


def _short(what: str, value: float, *, least: float = float("-inf"), most: float = float("inf")) -> list[str]:
    if least <= value <= most:
        return []
    return [f"{what} {value:.2f}, " + (f"at least {least:g}" if value < least else f"at most {most:g}")]
