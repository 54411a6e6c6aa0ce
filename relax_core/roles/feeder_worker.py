"""Implements the worker of the rollout role for algorithms that train on data rows without engines.

The worker connects to the bus, opens the data, and reclaims the groups of its earlier process. Then it starts the
processes that encode media and runs the feeder loop until the bus closes.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from relax_core.config.engine_checks import offline_rows
from relax_core.data.eval_sets import held_out_count
from relax_core.data.sources import make_source
from relax_core.registry import find_env
from relax_core.roles.discovery import discover_bus
from relax_core.roles.rollout_worker import CLOSE_SAMPLES_S, RolloutWorker
from relax_core.roles.sample_logs import open_sample_log
from relax_core.rollout.feeder_loop import FeederLoop
from relax_core.rollout.offline_rows import OfflineRows


class FeederWorker(RolloutWorker):
    """Runs feeder ``rank``. The trainer's ranks evaluate, so a feeder has no evaluation to wait for."""

    async def _run(self) -> None:
        context, config = self.context, self.context.config
        kind = offline_rows(config)
        assert kind is not None, "a feeder runs only for an algorithm on data rows"
        self._evaluated.set()
        bus = discover_bus(context, self.waiting)
        metrics = context.event_writer(self.name)
        source = make_source(config.data, seed=config.seed, eval_rows=held_out_count(config), offline=kind)
        reclaimed = await self._reclaim(bus)
        async with AsyncExitStack() as closing:
            encoders = await asyncio.to_thread(self._encoders, bus)
            if encoders is not None:
                closing.callback(encoders.close)
            samples = open_sample_log(context, self.name, tokenizer=self._rank == 0)
            if samples is not None:
                closing.push_async_callback(asyncio.to_thread, samples.close, timeout_s=CLOSE_SAMPLES_S)
            prompts = self._prompts(find_env(config.env.name), encoders, bus)
            loop = FeederLoop(
                bus=bus,
                source=source,
                rows=OfflineRows(
                    tokenizer=prompts.tokenizer,
                    kind=kind,
                    max_tokens=config.engine.context_tokens,
                    banned=config.rollout.banned(),
                ),
                prompts=prompts,
                settings=self._settings(prompts.tokenizer),
                record=metrics.record,
                bad_rows=self._bad_rows(len(source), metrics),
                samples=samples,
            )
            self.set_state("running")
            await self._sample(loop, reclaimed)
