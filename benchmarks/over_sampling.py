"""What over-sampling gains where response lengths have a long tail: ``python -m benchmarks.over_sampling``.

The real rollout over the bus's state machine and an embedded engine, without a trainer: a step is taken as soon as its
groups are complete, and the weights in force are renamed to the next version. The tiny model samples at a temperature
at which it stops by chance, so lengths are geometric up to ``--max-new-tokens``. Counted, a train step: decode steps of
the engine, which is how long the tail makes everybody wait where a decode step costs the same with more samples, as on
a GPU (on a CPU it costs in proportion); and tokens made for each that is trained, which is what it costs. Neither
depends on how busy the machine is. ``length``: tokens of a trained sample; who takes the first groups to finish takes
short ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.tiny_model import engine_config
from relax_core.bus.ledger.ledger import Ledger
from relax_core.bus.state.bus_state import BusCore
from relax_core.bus.state.settings import BusSettings
from relax_core.config.compose import load_config
from relax_core.contracts import columns as c
from relax_core.contracts.bus import Admission, BusClosed, CompleteGroup, LeaseRequest, VersionChange
from relax_core.contracts.engine import SamplingParams
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
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.rollout_loop import RolloutLoop
from relax_core.rollout.weight_update_handler import WeightUpdateHandler
from relax_core.tools.make_tiny import tiny_model_folder

GROUPS, GROUP_SIZE, TEMPERATURE = 8, 4, 3.0
TOKEN = "token-of-the-benchmark"
TIMEOUT_S = 600.0
KEEP = {"surplus": "keep", "on_stale": "mask"}
WAYS: dict[str, dict[str, Any]] = {  # name → settings of the bus
    "s=0": {"max_staleness": 0},
    "s=0 x1.25 drop": {"max_staleness": 0, "spare_groups": 2},
    "s=0 x1.5 drop": {"max_staleness": 0, "spare_groups": 4},
    "s=0 x1.5 keep": {"max_staleness": 0, "spare_groups": 4, **KEEP},
    "s=1": {"max_staleness": 1},
    "s=1 x1.5 drop": {"max_staleness": 1, "spare_groups": 4},
    "s=1 x1.5 keep": {"max_staleness": 1, "spare_groups": 4, **KEEP},
}


class StepAtOnce:
    """The bus, with a trainer that takes a step as soon as its rows are there. ``tokens``: of the trained samples."""

    def __init__(self, settings: BusSettings, url: str) -> None:
        self.core = BusCore(settings, ledger=Ledger(group_size=settings.group_size, journal=None), clock=time.monotonic)
        self._url = url
        self._changed = asyncio.Event()
        self._lengths: dict[str, int] = {}
        self.tokens = 0

    async def admit_async(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        while not (admitted := self.core.admit(max_groups, worker=worker)):
            await self._change(timeout_s)
        return admitted

    async def wait_version_async(self, since_version: int, *, worker: int = 0, timeout_s: float) -> VersionChange:
        while (change := self.core.version_change(since_version, worker=worker)) is None:
            await self._change(timeout_s)
        return change

    async def _change(self, timeout_s: float) -> None:
        self._changed.clear()
        async with asyncio.timeout(timeout_s):
            await self._changed.wait()

    async def put_async(self, rows: Sequence[CompleteGroup], *, timeout_s: float) -> None:
        self.core.put(rows)
        self._lengths |= {row.group_uid: _tokens(row) for row in rows}
        while not self.core.finished():  # groups of several steps may come together
            step = self.core.version
            request = LeaseRequest(task="actor", columns=(c.EPISODES,), min_groups=GROUPS, max_groups=GROUPS, step=step)
            if (lease := self.core.lease(request)) is None:
                break
            self.tokens += sum(self._lengths[row.group_uid] for row in lease.rows)
            await asyncio.to_thread(rename_weights, self._url, step + 1)
            self.core.ack([lease.lease_id], step=step, dropped={})
            self._changed.set()
        self._changed.set()

    async def name_modalities_async(self, modalities: Mapping[int, str], *, timeout_s: float) -> None:
        raise AssertionError("a run on text names no modality")

    async def drop_async(self, group_uid: str, *, reason: str, timeout_s: float) -> None:
        self.core.drop(group_uid, reason=reason)
        self._changed.set()


def _tokens(row: CompleteGroup) -> int:
    """Sampled tokens of a row's answers."""
    return sum(turn.end - turn.start for one in c.decode_episodes(row.columns[c.EPISODES]) for turn in one.turns)


def rename_weights(url: str, version: int) -> None:
    """The weights in force become ``version``: a push that takes no time."""
    body = json.dumps({"new_version": version}).encode()
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/update_weight_version", body, headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        answer.read()


async def roll_out(url: str, folder: Path, settings: BusSettings, *, max_new_tokens: int) -> StepAtOnce:
    """A whole run of the rollout."""
    config = load_config(settle=settle)
    client = EngineClient(url, TOKEN, request_timeout_s=TIMEOUT_S, control_timeout_s=TIMEOUT_S)
    bus = StepAtOnce(settings, url)
    tokenizer = PromptTokenizer(folder)

    async def client_for(engine: int, on_policy: bool) -> EngineClient:
        return client

    pool = EnginePool(1, client_for, timeout_s=TIMEOUT_S)
    with RewardPool(find_reward(config.reward.name), config.reward, workers=1) as rewards:
        source = make_source(config.data, seed=0, eval_rows=0)
        sampler = RolloutLoop(
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
                batch_prompts=GROUPS + settings.spare_groups,
                sampling=SamplingParams(
                    n=GROUP_SIZE,
                    max_new_tokens=max_new_tokens,
                    temperature=TEMPERATURE,
                    stop_token_ids=tokenizer.stop_token_ids,
                ),
                admit_timeout_s=TIMEOUT_S,
                call_timeout_s=TIMEOUT_S,
                max_failed_groups=GROUPS,
            ),
            record=lambda source, step, values: None,
            gate=no_gate,
            bad_rows=BadRows(rows=len(source), most=0.0, report=lambda rows: None),
            weight_update_handler=WeightUpdateHandler(bus, pool, max_aborts=0, call_timeout_s=TIMEOUT_S),
        )
        try:
            await sampler.run([])
        except BusClosed:
            await client.aclose()
    return bus


async def no_gate(version: int) -> None:
    """Nothing is evaluated here."""


def measure(settings: BusSettings, *, max_new_tokens: int) -> tuple[float, float, float]:
    """(decode steps a train step, tokens made for each that is trained, tokens of a trained sample)."""
    folder = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    with tempfile.TemporaryDirectory(prefix="relax-over-") as temporary:
        token_file = Path(temporary) / "token"
        token_file.write_text(TOKEN)
        process = EngineProcess.start(
            EngineLaunch(
                model_folder=folder,
                engine=replace(engine_config(), context_length=1024),
                dtype="float32",
                token_file=token_file,
                log_file=Path(temporary) / "engine.log",
                load_weights=True,
            )
        )
        try:
            bus = asyncio.run(roll_out(process.url, folder, settings, max_new_tokens=max_new_tokens))
            control = EngineClient(process.url, TOKEN, request_timeout_s=TIMEOUT_S, control_timeout_s=TIMEOUT_S)
            loads = control.loads()
        finally:
            process.stop(timeout_s=5.0)
    steps = settings.total_steps
    return (
        loads["decode_steps"] / steps,
        loads["generated_tokens"] / bus.tokens,
        bus.tokens / (steps * GROUPS * GROUP_SIZE),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="train steps of a run")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    arguments = parser.parse_args()
    print(f"{'':18}{'decode steps':>14}{'ratio':>8}{'tokens made':>13}{'length':>8}")
    bases: dict[object, float] = {}
    for name, way in WAYS.items():
        settings = msgspec.convert(
            {
                "groups_per_step": GROUPS,
                "group_size": GROUP_SIZE,
                "on_stale": "drop",
                "total_steps": arguments.steps,
                "inline_bytes": 1 << 20,
                "max_row_bytes": 1 << 24,
                **way,
            },
            BusSettings,
        )
        decode_steps, made, length = measure(settings, max_new_tokens=arguments.max_new_tokens)
        base = bases.setdefault(settings.max_staleness, decode_steps)
        print(f"{name:18}{decode_steps:14.1f}{base / decode_steps:7.2f}×{made:13.2f}{length:8.1f}", flush=True)


if __name__ == "__main__":
    main()
