"""Runs the rollout loop in tests, with the bus's state machine and a trainer that consumes every group."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.choices import Overlong
from relax_core.contracts import columns as c
from relax_core.contracts.bus import Admission, BusClosed, BusTimeout, Group, VersionChange
from relax_core.contracts.data import BadRow, DataRow, EvalSet
from relax_core.contracts.engine import SamplingParams
from relax_core.contracts.env import EnvConfig, EnvSpec
from relax_core.contracts.reward import RewardInput, RewardOutput, RewardSpec
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.observe.sample_log import SampleLog
from relax_core.registry import find_env, find_reward
from relax_core.rollout.episodes.episode_player import EpisodePlayer
from relax_core.rollout.episodes.group_assembly import MakeExtras
from relax_core.rollout.episodes.group_player import EarlyEnds, GroupPlayer, OneTurnPlayer
from relax_core.rollout.partial_rollout import WeightUpdateHandler
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.rollout_loop import BadRows, RolloutLoop, RolloutLoopSettings
from tests.bus.make_rows import for_actor, make_core
from tests.contracts.engine.harness import Engine

STEP_GROUPS = 3
GROUP_SIZE = 2
CONTEXT = 64
Recorded = tuple[str, int, Mapping[str, float]]  # source, weight version, values
LONG_S = 120.0  # a timeout for tests that hang


class ReplayBufferBus:
    """Runs `ReplayBuffer` in the event loop of the rollout loop. Its trainer trains a step as soon as the groups are
    complete.
    """

    def __init__(
        self,
        *,
        steps: int,
        put: Callable[[Sequence[Group]], None] = lambda rows: None,
        on_step: Callable[[int], None] = lambda version: None,
        **settings: Any,
    ) -> None:
        self._on_step = on_step
        self.core = make_core(
            **{"groups_per_step": STEP_GROUPS, "group_size": GROUP_SIZE, "total_steps": steps, "max_staleness": 0}
            | settings
        )
        self.rows: dict[str, Group] = {}
        self.puts = 0
        self._on_put = put
        self._changed = asyncio.Event()

    async def admit(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        while True:
            if self.core.finished():
                raise BusClosed("all train steps are done")
            if admitted := self.core.admit(max_groups, worker=worker):
                return admitted
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError as late:
                raise BusTimeout("no credit") from late

    async def put(self, rows: Sequence[Group], *, timeout_s: float) -> None:
        await asyncio.sleep(0)
        self._on_put(rows)
        self.puts += 1
        self.core.put(rows)
        self.rows |= {row.group_uid: row for row in rows}
        self._train()

    async def name_modalities(self, modalities: Mapping[int, str], *, timeout_s: float) -> None:
        self.core.name_modalities(modalities)

    async def drop(self, group_uid: str, *, reason: str, timeout_s: float) -> None:
        self.core.drop(group_uid, reason=reason)
        self._train()

    def _train(self) -> None:
        request = for_actor(self.core.version, groups=self.core.settings.groups_per_step)
        request = type(request)(**{**_fields(request), "columns": (c.EPISODES,)})
        if lease := self.core.lease(request):
            self._on_step(self.core.version + 1)
            self.core.ack([lease.lease_id], step=self.core.version, dropped={})
        self._changed.set()

    async def wait_version(self, since_version: int, *, worker: int = 0, timeout_s: float) -> VersionChange:
        while True:
            if change := self.core.version_change(since_version, worker=worker):
                return change
            self._changed.clear()
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()


def _fields(request: Any) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


class Rows:
    """A data source. Its row ``i`` has the index ``i`` and the prompt ``rev <100 + i>``.

    ``changes`` maps indices to other prompts, or to None for an unusable data row.
    """

    def __init__(self, changes: Mapping[int, str | None]) -> None:
        self._changes = changes

    def __len__(self) -> int:
        return 1000

    def number(self, index: int) -> int:
        return index

    def row(self, index: int) -> DataRow:
        prompt = self._changes.get(index, f"rev {100 + index}")
        if prompt is None:
            raise BadRow.because("answer", f"{self.where(index)}: answer=None is neither text nor a number.")
        return {"prompt": prompt, "answer": str(100 + index)[::-1]}

    def numbered(self, number: int) -> DataRow:
        return self.row(number)

    def where(self, number: int) -> str:
        return f"rows.jsonl, line {number + 1}"

    def held_out(self) -> EvalSet:
        return EvalSet(name="", rows=[])


async def no_gate(version: int) -> None: ...


async def sample(
    engine: Engine,
    folder: Path,
    bus: ReplayBufferBus,
    *,
    reward: RewardSpec | None = None,
    reclaimed: Sequence[Admission] = (),
    client: EngineClient | None = None,
    workers: int = 1,
    **options: Any,
) -> list[Recorded]:
    """Runs a loop with the ``options`` of `build_loop` until the bus closes. Returns the recorded metrics."""
    client = client or engine.new_client()
    spec = reward or find_reward("reverse_digits")
    records: list[Recorded] = []

    async def client_for(number: int, refresh: bool) -> Any:
        return client

    with RewardPool(spec, spec.config(name=spec.name, timeout_s=LONG_S), workers=1, concurrency=8) as rewards:
        pool = EnginePool(1, client_for, timeout_s=60.0)
        loop = build_loop(folder, bus, pool, rewards, records, workers=workers, **options)
        await run_to_end(loop, reclaimed, client, alone=workers == 1)
    return records


def build_loop(
    folder: Path,
    bus: ReplayBufferBus,
    pool: EnginePool,
    rewards: RewardPool,
    records: list[Recorded],
    *,
    prompts: Mapping[int, str | None] | None = None,
    bad_rows: BadRows | None = None,
    overlong: Overlong = Overlong.drop,
    gate: Callable[[int], Awaitable[None]] = no_gate,
    max_new_tokens: int = 8,
    temperature: float = 1.0,
    max_aborts: int | None = None,
    advantages: MakeExtras | None = None,
    env: EnvSpec | None = None,
    env_config: EnvConfig | None = None,
    context: int = CONTEXT,
    worker: int = 0,
    workers: int = 1,
    items: Any = None,
    ends: EarlyEnds | None = None,
    samples: SampleLog | None = None,
    lockstep: bool = False,
    **settings: Any,
) -> RolloutLoop:
    """Returns a loop over `Rows` with these ``prompts`` and ``settings``. The loop adds its metrics to ``records``."""
    tokenizer = PromptTokenizer(folder)
    env = env or find_env("single_turn")
    env_config = env_config or env.config(name=env.name)
    maker = PromptMaker(
        env=env,
        env_config=env_config,
        tokenizer=tokenizer,
        max_prompt_tokens=context - max_new_tokens,
        overlong=overlong,
        items=items,
    )
    sampling = SamplingParams(
        n=bus.core.settings.group_size,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop_token_ids=tokenizer.stop_token_ids,
    )
    loop_settings = RolloutLoopSettings(
        seed=0,
        batch_prompts=math.ceil((bus.core.settings.groups_per_step + bus.core.settings.spare_groups) / workers),
        sampling=sampling,
        admit_timeout_s=60.0,
        call_timeout_s=60.0,
        max_failed_groups=settings.pop("max_failed_groups", 4 * STEP_GROUPS),
        worker=worker,
        alone=workers == 1,
        **settings,
    )
    handler = None
    player: GroupPlayer = OneTurnPlayer(prompts=maker, pool=pool, sampling=sampling)
    if env.has_turns:
        player = EpisodePlayer(
            env=env,
            env_config=env_config,
            prompts=maker,
            pool=pool,
            sampling=sampling,
            seed=0,
            ends=ends,
            in_order=loop_settings.in_order,
            lockstep=lockstep,
        )
    if max_aborts is not None:
        handler = WeightUpdateHandler(bus, pool, max_aborts=max_aborts, call_timeout_s=60.0, worker=worker)
    return RolloutLoop(
        bus=bus,
        source=Rows(prompts or {}),
        prompts=maker,
        rewards=rewards,
        player=player,
        settings=loop_settings,
        record=lambda source, version, values: records.append((source, version, values)),
        gate=gate,
        bad_rows=bad_rows or BadRows(rows=1000, most=0.05, report=lambda rows: None),
        weight_update_handler=handler,
        advantages=advantages,
        samples=samples,
    )


async def run_to_end(loop: RolloutLoop, reclaimed: Sequence[Admission], client: EngineClient, *, alone: bool) -> None:
    """Runs the loop until the bus closes. Fails if a single loop leaves a running task."""
    try:
        with pytest.raises(BusClosed):
            await loop.run(reclaimed)
    finally:
        await client.aclose()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not alone or not [task for task in left if "RolloutLoop" in repr(task)], left


def renamed(engine: Engine) -> Callable[[int], None]:
    """Returns a callback that gives the served weights the next version, like a push of equal weights."""

    def on_step(version: int) -> None:
        engine.post("/update_weight_version", {"new_version": version})

    return on_step


async def within(call: Awaitable[None]) -> None:
    """Awaits ``call`` with a timeout, because a loop that misses a failure would wait forever."""
    async with asyncio.timeout(LONG_S):
        await call


def scored(score: Callable[[RewardInput, Any], RewardOutput]) -> RewardSpec:
    return dataclasses.replace(find_reward("reverse_digits"), score=score)


async def sample_with(
    engine: Engine, folder: Path, *, put: Callable[[Sequence[Group]], None] = lambda rows: None, **changes: Any
) -> None:
    """Runs a loop of two steps that calls ``put`` to put groups on the bus."""
    await sample(engine, folder, ReplayBufferBus(steps=2, put=put), **changes)
