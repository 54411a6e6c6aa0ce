"""An engine pool and a reward pool whose waits are recorded among the rollout worker's waits."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import cast

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.media import MediaItem
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec
from relax_core.engines.pool.engine_pool import BringMedia, EnginePool, OnEnd
from relax_core.engines.pool.engine_watch import ClientFor
from relax_core.engines.protocol.request_body import OnTokens
from relax_core.roles.process.traced_bus import Waiting
from relax_core.rollout.rewards.hang_watch import OnHang
from relax_core.rollout.rewards.reward_pool import RewardPool


class TracedEnginePool(EnginePool):
    """Is an engine pool that records the time until the next group of responses as a wait for the engine."""

    def __init__(
        self,
        count: int,
        client_for: ClientFor,
        *,
        timeout_s: float,
        silent_s: float,
        by_load: bool,
        max_lag: int,
        lag_s: float,
        waiting: Waiting,
        bring_media: BringMedia | None = None,
        item_work: Callable[[MediaItem], float] | None = None,
    ) -> None:
        super().__init__(
            count,
            client_for,
            timeout_s=timeout_s,
            silent_s=silent_s,
            by_load=by_load,
            max_lag=max_lag,
            lag_s=lag_s,
            bring_media=bring_media,
            item_work=item_work,
        )
        self._waiting = waiting

    async def generate(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        places: Sequence[int],
        on_end: OnEnd | None = None,
        on_tokens: OnTokens | None = None,
    ) -> AsyncIterator[tuple[int, list[Generated]]]:
        """Yields each prompt's number and responses, as `EnginePool.generate` does."""
        generated = super().generate(prompts, params, places=places, on_end=on_end, on_tokens=on_tokens)
        groups = cast(AsyncGenerator[tuple[int, list[Generated]], None], generated)  # closed together with this one
        what = f"responses to {len(prompts)} prompts (first {prompts[0].rid})" if prompts else "nothing"
        try:
            while True:
                with self._waiting(what, on="engine"):
                    try:
                        group = await anext(groups)
                    except StopAsyncIteration:
                        return
                yield group
        finally:
            await groups.aclose()


class TracedRewardPool(RewardPool):
    """Is a reward pool that records scoring as the worker's own wait, because a reward may hang in this process."""

    def __init__(
        self,
        spec: RewardSpec,
        config: RewardConfig,
        *,
        workers: int,
        concurrency: int,
        log_file: Path,
        on_hang: OnHang,
        waiting: Waiting,
        name: str,
    ) -> None:
        super().__init__(spec, config, workers=workers, concurrency=concurrency, log_file=log_file, on_hang=on_hang)
        self._waiting = waiting
        self._name = name

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardOutput]:
        """Returns the outputs of the answers to one data row, as `RewardPool.score` does."""
        with self._waiting(f"rewards of {len(inputs)} responses", on=self._name):
            return await super().score(inputs)
