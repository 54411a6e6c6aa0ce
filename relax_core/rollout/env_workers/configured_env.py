"""Opens the environment of a run or an evaluation, with the processes for its episodes."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.engine import SamplingParams
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_pool import EnginePool
from relax_core.registry import find_env
from relax_core.rollout.env_workers.env_workers import EnvWorkers
from relax_core.rollout.episodes.episode_player import EpisodePlayer
from relax_core.rollout.episodes.group_player import EarlyEnds, GroupPlayer, OneTurnPlayer
from relax_core.rollout.prompt_tokens import PromptMaker

if TYPE_CHECKING:
    from relax_core.rollout.agents.agent_host import AgentHost

ENV_LOG = "env.log"  # file for the output of an isolated env's worker processes


class ConfiguredEnv:
    """Holds the env that ``config`` names. The object must be used by one event loop, and be closed.

    The output of worker processes goes to a file in ``log_dir``. ``rank`` is the rank of the rollout worker.
    """

    def __init__(self, config: RelaxConfig, *, log_dir: Path, rank: int = 0) -> None:
        self.env = find_env(config.env.name)
        self._config = config
        self._log_dir = log_dir
        self._rank = rank
        self._agents: AgentHost | None = None
        self._workers = EnvWorkers(self.env, config.env, log_file=log_dir / ENV_LOG) if self.env.isolated else None

    def __enter__(self) -> ConfiguredEnv:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @asynccontextmanager
    async def serving(self, tokenizer: PromptTokenizer, *, token: str = "") -> AsyncIterator[None]:
        """Serves the endpoint if agents play the episodes; the agents end with this context.

        The token of external agents is derived from ``token``, the run's token. An empty ``token`` is replaced by a
        random token.
        """
        if self.env.agent is None:
            yield
            return
        # Imported here, because the server's modules use memory, and only agents need the server.
        from relax_core.rollout.agents.agent_host import agent_host
        from relax_core.rollout.agents.external_agents import sessions_token

        async with agent_host(
            self._config,
            tokenizer,
            folder=self._log_dir / f"agents-{self._rank}",
            rank=self._rank,
            token=sessions_token(token or secrets.token_hex()),
        ) as self._agents:
            yield

    def player(
        self,
        prompts: PromptMaker,
        pool: EnginePool,
        sampling: SamplingParams,
        *,
        seed: int,
        ends: EarlyEnds | None = None,
        reached: Callable[[int], Awaitable[None]] | None = None,
    ) -> GroupPlayer:
        """Returns the player of groups of ``sampling.n`` episodes.

        `EpisodePlayer` explains ``sampling``, `EarlyEnds` explains ``ends``, and `AgentPlayer` explains ``reached``.
        With agents, the context of `serving` must be open.
        """
        if not self.env.has_turns:
            return OneTurnPlayer(prompts=prompts, pool=pool, sampling=sampling)
        in_order = self._config.in_order
        if self.env.agent is not None:
            from relax_core.rollout.agents.agent_player import agent_player

            assert self._agents is not None, "agents play while `serving` is open"
            return agent_player(
                self._config,
                self._agents,
                prompts,
                pool,
                sampling,
                seed=seed,
                ends=ends,
                reached=reached,
                in_order=in_order,
            )
        env = self.env if self._workers is None else self._workers.spec(episodes_per_group=sampling.n)
        return EpisodePlayer(
            env=env,
            env_config=self._config.env,
            prompts=prompts,
            pool=pool,
            sampling=sampling,
            seed=seed,
            ends=ends,
            in_order=in_order,
            lockstep=self._config.rollout.lockstep,
        )

    def close(self) -> None:
        """Kills the worker processes with all of their children."""
        if self._workers is not None:
            self._workers.close()
