"""Measures what slow tools, env workers and the sandbox cost, for `benchmarks.episodes` without ``--learn``.

The rollout is the real one, over the bus's state machine and an embedded engine; a train step is taken as soon as its
groups are there (`benchmarks.over_sampling`). 8 groups of 16 episodes a step, 8 turns of at most 4 tokens, a tool of
20 ms, asynchronous with a staleness of 2. With a tail, 1% of the calls of the tool take 2 s.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from benchmarks.isolated_number_guess import SPEC as ISOLATED
from benchmarks.isolated_number_guess import IsolatedNumberGuessConfig
from benchmarks.over_sampling import TIMEOUT_S, TOKEN, StepAtOnce, no_gate
from benchmarks.tiny_model import engine_config
from relax_core.bus.state.settings import BusSettings
from relax_core.config.compose import load_config
from relax_core.contracts import columns as c
from relax_core.contracts.bus import BusClosed, CompleteGroup
from relax_core.contracts.engine import SamplingParams
from relax_core.contracts.env import (
    Action,
    BaseInteractionEnv,
    EnvSpec,
    EpisodeStart,
    InteractionConfig,
    StepResult,
)
from relax_core.data.sources import make_source
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.pool.engine_pool import EnginePool
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.preflight import settle
from relax_core.registry import find_reward
from relax_core.rollout.bad_rows import BadRows
from relax_core.rollout.env_workers.env_workers import EnvWorkers
from relax_core.rollout.episodes.episodes import EpisodePlayer
from relax_core.rollout.episodes.played_group import EarlyEnds
from relax_core.rollout.prompt_admissions import RolloutLoopSettings
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.rollout_loop import RolloutLoop
from relax_core.rollout.weight_update_handler import WeightUpdateHandler
from relax_core.sandbox import run_code as sandbox
from relax_core.tools.make_tiny import tiny_model_folder

GROUPS, GROUP_SIZE, TURNS, TURN_TOKENS, CONTEXT = 8, 16, 8, 4, 256
TOOL_S, SLOW_S, SLOW_SHARE, HOLD_S = 0.02, 2.0, 0.01, 10.0
IN_FLIGHT = 4  # steps whose groups are in flight at a staleness of 2, admission being a step ahead
SIMULATED_GROUPS = 2000


@dataclass(frozen=True, kw_only=True)
class Way:
    """Is a way to deal with slow tools.

    It says whether there are any, which quorum completes a group and how many seconds the other episodes then have,
    how many groups a step has beyond those that it trains, and whether turn k of all episodes goes out together.
    """

    tail: bool = True
    quorum: float = 1.0
    grace_s: float = 0.0
    spare_groups: int = 0
    lockstep: bool = False


NO_TAIL = "no tail"
WAYS = {
    NO_TAIL: Way(tail=False),
    "quorum 1.0": Way(),
    "quorum 0.75": Way(quorum=0.75),
    "quorum 0.75, 0.2 s": Way(quorum=0.75, grace_s=0.2),
    "over-sampling 1.5": Way(spare_groups=GROUPS // 2),
    "lockstep": Way(lockstep=True),
}


class Tool(BaseInteractionEnv):
    """Answers after the time of a tool. A run has a class of its own.

    ``hold`` is the seed of a group whose calls take `HOLD_S` from now on, ``newest`` that of the last group that
    answered in the first half of its turns. ``answered`` counts the answers, and ``ended`` the episodes.
    """

    tail = False
    hold: int | None = None
    newest: int | None = None
    answered = 0
    ended = 0

    def __init__(self, start: EpisodeStart, config: InteractionConfig) -> None:
        self._start = start
        self._draw = random.Random(start.episode_seed)
        self._left = TURNS

    async def reset(self) -> str:
        """Returns the question."""
        return str(self._start.row["prompt"])

    async def step(self, action: Action) -> StepResult:
        """Waits as a tool does."""
        slow = self.tail and self._draw.random() < SLOW_SHARE
        held = self._start.group_seed == type(self).hold
        await asyncio.sleep(HOLD_S if held else SLOW_S if slow else TOOL_S)
        self._left -= 1
        run = type(self)
        run.answered += 1
        run.ended += not self._left
        if self._left > TURNS // 2:
            run.newest = self._start.group_seed
        return StepResult(observation="go on", reward=float(len(action.text)), done=not self._left)


class TimedBus(StepAtOnce):
    """Notes the time of each train step and the rewarded episodes of each group."""

    def __init__(self, settings: BusSettings, url: str) -> None:
        super().__init__(settings, url)
        self.times: list[float] = []
        self.rewarded: list[int] = []

    async def put_async(self, rows: Sequence[CompleteGroup], *, timeout_s: float) -> None:
        before = self.core.version
        for row in rows:
            episodes = c.decode_episodes(row.columns[c.EPISODES])
            self.rewarded.append(sum(one.reward is not None for one in episodes))
        await super().put_async(rows, timeout_s=timeout_s)
        self.times += [time.monotonic()] * (self.core.version - before)

    async def wait_steps(self, steps: int) -> None:
        """Returns when so many train steps have been made."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.times) < steps:
                await asyncio.sleep(0.01)


def with_rollout(way: Way, watch: Callable[[TimedBus, type[Tool]], Any]) -> Any:
    """Runs a rollout and returns what ``watch`` does, a coroutine function that gets its bus and its class of tools."""
    folder = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    engine = replace(engine_config(), context_length=CONTEXT)
    with tempfile.TemporaryDirectory(prefix="relax-episodes-") as temporary:
        token_file = Path(temporary) / "token"
        token_file.write_text(TOKEN)
        log_file = Path(temporary) / "engine.log"
        launch = EngineLaunch(
            model_folder=folder,
            engine=engine,
            dtype="float32",
            token_file=token_file,
            log_file=log_file,
            load_weights=True,
        )
        process = EngineProcess.start(launch)
        try:
            return asyncio.run(_watched(process.url, folder, way, watch))
        finally:
            process.stop(timeout_s=5.0)


async def _watched(url: str, folder: Path, way: Way, watch: Callable[[TimedBus, type[Tool]], Any]) -> Any:
    given = {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "on_stale": "drop", "max_staleness": 2}
    given |= {"total_steps": 10**6, "inline_bytes": 1 << 20, "max_row_bytes": 1 << 24, "spare_groups": way.spare_groups}
    bus = TimedBus(msgspec.convert(given, BusSettings), url)
    client = EngineClient(url, TOKEN, request_timeout_s=TIMEOUT_S, control_timeout_s=TIMEOUT_S)

    async def client_for(engine: int, on_policy: bool) -> EngineClient:
        return client

    tools = type("Tool", (Tool,), {"tail": way.tail})
    pool = EnginePool(1, client_for, timeout_s=TIMEOUT_S)
    reward = find_reward("env")
    with RewardPool(reward, reward.config(name="env", timeout_s=TIMEOUT_S), workers=1) as rewards:
        running = asyncio.create_task(_loop(bus, pool, rewards, folder, way, tools).run([]))
        try:
            return await watch(bus, tools)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, BusClosed):
                await running
            await client.aclose()


def _loop(
    bus: TimedBus, pool: EnginePool, rewards: RewardPool, folder: Path, way: Way, tools: type[Tool]
) -> RolloutLoop:
    tokenizer = PromptTokenizer(folder)
    config = InteractionConfig(name="tool", max_turns=TURNS, max_turn_tokens=TURN_TOKENS, on_turn_cut="continue")
    env = EnvSpec(name="tool", summary="a tool that may be slow", config=InteractionConfig, open=tools)
    sampled = TURNS * TURN_TOKENS
    prompts = PromptMaker(env=env, env_config=config, tokenizer=tokenizer, max_prompt_tokens=CONTEXT - sampled)
    sampling = SamplingParams(n=GROUP_SIZE, max_new_tokens=sampled, stop_token_ids=tokenizer.stop_token_ids)
    source = make_source(load_config(settle=settle).data, seed=0, eval_rows=0)
    ends = EarlyEnds(quorum=way.quorum, grace_s=way.grace_s)
    player = EpisodePlayer(env=env, env_config=config, prompts=prompts, pool=pool, sampling=sampling, seed=0, ends=ends)
    settings = RolloutLoopSettings(
        seed=0,
        batch_prompts=GROUPS + way.spare_groups,
        sampling=sampling,
        admit_timeout_s=TIMEOUT_S,
        call_timeout_s=TIMEOUT_S,
        max_failed_groups=GROUPS,
        lockstep=way.lockstep,
    )
    return RolloutLoop(
        bus=bus,
        pool=pool,
        source=source,
        prompts=prompts,
        rewards=rewards,
        player=player,
        settings=settings,
        record=lambda name, step, values: None,
        gate=no_gate,
        bad_rows=BadRows(rows=len(source), most=0.0, report=lambda rows: None),
        weight_update_handler=WeightUpdateHandler(bus, pool, max_aborts=0, call_timeout_s=TIMEOUT_S),
    )


def rate(way: Way, *, steps: int) -> tuple[float, float]:
    """Returns the groups for each second that a rollout delivers to ``steps`` train steps, and the samples of a group.

    Only episodes with a reward are samples. Groups that are admitted together end together, so ``steps`` is a multiple
    of the steps in flight.
    """

    async def watch(bus: TimedBus, tools: type[Tool]) -> tuple[float, float]:
        await bus.wait_steps(IN_FLIGHT + steps)
        groups = steps * GROUPS / (bus.times[IN_FLIGHT + steps - 1] - bus.times[IN_FLIGHT - 1])
        return groups, fmean(bus.rewarded)

    found: tuple[float, float] = with_rollout(way, watch)
    return found


def held_group(way: Way) -> tuple[float, float]:
    """Returns samples/s and turns/s while a group sits in a tool of `HOLD_S` over those before and after it.

    A sample counts when its episode ends. The group is in the first half of its turns when its calls become slow.
    Without spare groups, the last train step that may take the group waits for it.
    """

    async def watch(bus: TimedBus, tools: type[Tool]) -> tuple[float, float]:
        await bus.wait_steps(IN_FLIGHT)
        rates = []
        for held in (False, True, False):
            tools.hold = tools.newest if held else None
            before, began = (tools.ended, tools.answered), time.monotonic()
            await asyncio.sleep(HOLD_S)
            seconds = time.monotonic() - began
            rates.append(((tools.ended - before[0]) / seconds, (tools.answered - before[1]) / seconds))
        samples, turns = (2 * during / (first + last) for first, during, last in zip(*rates, strict=True))
        return samples, turns

    found: tuple[float, float] = with_rollout(way, watch)
    return found


def simulated(way: Way, *, turn_s: float) -> float:
    """Returns the most that groups/s with a tail can be of those without one.

    A place in flight is held by a group until its quorum has ended and the grace is over, and taken again at once; a
    turn of the engine takes ``turn_s`` seconds whatever else it does.
    """
    draw = random.Random(0)
    place = EarlyEnds(quorum=way.quorum).needed(GROUP_SIZE) - 1
    plain = TURNS * (turn_s + TOOL_S)

    def held() -> float:
        ends = sorted(
            plain + sum((SLOW_S - TOOL_S) * (draw.random() < SLOW_SHARE) for _ in range(TURNS)) for _ in slots
        )
        return min(ends[-1], ends[place] + way.grace_s)

    slots = range(GROUP_SIZE)
    return plain / fmean(held() for _ in range(SIMULATED_GROUPS))


def env_worker_ms(*, steps: int = 500) -> float:
    """Returns how many ms more a step takes in an env worker than in this process; medians of steps in turns."""
    file = Path(__file__).with_name("isolated_number_guess.py")
    config = IsolatedNumberGuessConfig(name=str(file), max_turns=10**6)

    async def scene() -> float:
        workers = EnvWorkers(ISOLATED, config)
        try:
            opened = workers.spec(episodes_per_group=1).open
            assert opened is not None and ISOLATED.open is not None
            start = EpisodeStart(row={"prompt": ""}, group_seed=1, episode_seed=1)
            away: Any = await opened(start, config)  # type: ignore[misc]
            envs, times = [ISOLATED.open(start, config), away], ([], [])  # type: tuple[Any, tuple[list[float], ...]]
            for env in envs:
                await env.reset()
            for _ in range(steps):
                for env, own in zip(envs, times, strict=True):
                    began = time.perf_counter()
                    await env.step(Action(text="0", stopped=True))
                    own.append(time.perf_counter() - began)
            return 1e3 * (median(times[1]) - median(times[0]))
        finally:
            await asyncio.to_thread(workers.close)

    return asyncio.run(scene())


def sandbox_ms(*, runs: int = 20) -> tuple[float, float]:
    """Returns how many ms print(1) takes in the sandbox more than in a plain process, and that one's ms (medians)."""
    python = sandbox._interpreter(None if os.getuid() else sandbox._unused_uid())  # the one in the sandbox
    inside, plain = [], []
    for _ in range(runs):
        began = time.perf_counter()
        sandbox.run_code("print(1)", sandbox.CodeLimits())
        inside.append(time.perf_counter() - began)
        began = time.perf_counter()
        subprocess.run([python, "-I", "-B", "-c", "print(1)"], stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_S)
        plain.append(time.perf_counter() - began)
    return 1e3 * (median(inside) - median(plain)), 1e3 * median(plain)


def measure(*, rounds: int, steps: int) -> None:
    """Prints all figures; each way is measured ``rounds`` times, in turns with the others."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    more, plain = sandbox_ms()
    print(f"print(1) in the sandbox: {more:+.1f} ms over a plain process ({plain:.1f} ms)", flush=True)
    print(f"a step through an env worker: {env_worker_ms():+.2f} ms over one in this process", flush=True)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name, way in WAYS.items():
            if not way.lockstep:
                rates[name].append(rate(way, steps=steps))
            elif not number:  # each of its turns waits for the slowest call: 20 s a train step
                rates[name].append(rate(way, steps=IN_FLIGHT))
    print(f"{'way':20}{'groups/s':>10}{'ratio':>8}{'limit':>8}{'samples a group':>17}{'samples/s':>11}{'ratio':>8}")
    base = median(groups for groups, _ in rates[NO_TAIL])
    turn_s = IN_FLIGHT * GROUPS / base / TURNS - TOOL_S  # of the groups in flight
    for name, own in rates.items():
        way, groups, samples = WAYS[name], median(one for one, _ in own), fmean(one for _, one in own)
        by_quorum = way.tail and not way.spare_groups and not way.lockstep  # the simulation knows nothing else
        limit = f"{simulated(way, turn_s=turn_s):.2f}" if by_quorum else ""
        figures = f"{groups:10.2f}{groups / base:8.2f}{limit:>8}{samples:17.1f}"
        print(f"{name:20}{figures}{groups * samples:11.0f}{groups * samples / base / GROUP_SIZE:8.2f}", flush=True)
    for spare in (0, 1):
        way = Way(tail=False, spare_groups=spare)
        samples, turns = (median(own) for own in zip(*(held_group(way) for _ in range(rounds)), strict=True))
        print(f"a group sits in a tool of {HOLD_S:g} s, {spare} spare groups a step: ", end="")
        print(f"{samples:.2f} of the samples/s without, {turns:.2f} of the turns/s", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}. Prefilled tokens and engine time: python -m benchmarks.prefix_cache")
