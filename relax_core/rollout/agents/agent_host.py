"""Serves the endpoint of one rollout worker, and sends attempts at episodes to agents."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from relax_core.config.schema import AgentConfig, RelaxConfig
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.registry import find_env
from relax_core.rollout.agent_processes import agent_process
from relax_core.rollout.agent_processes.agent_tasks import AgentResult, AgentRunner, AgentTask
from relax_core.rollout.agent_processes.agent_worker_pool import AgentWorkerPool
from relax_core.rollout.agent_processes.one_shot_agents import OneShotAgentRunner
from relax_core.rollout.agents.agent_command import agent_command_of, max_concurrent_agents
from relax_core.rollout.agents.agent_session import AgentSession, SessionTable
from relax_core.rollout.agents.endpoint_app import EndpointApp, served
from relax_core.rollout.agents.external_agents import SESSIONS, ExternalAgents, write_address
from relax_core.rollout.episodes.episode_records import EpisodeRecord

LOGGED_FAILURES = 3  # failed attempts with a logged output
END_S = 10.0  # limit of the wait for a cancelled call of the runner; such a call normally returns at once
MAX_BODY_BYTES = 16 * 10**6  # limit of a request's body
_ANY_ADDRESS = ("0.0.0.0", "::")
log = logging.getLogger(__name__)


class AgentHost:
    """Holds the sessions of one rollout worker, and plays attempts. `agent_host` creates the object.

    The semaphore ``places`` limits the concurrent episodes to ``at_once``.
    """

    def __init__(
        self, agent: AgentConfig, sessions: SessionTable, *, base_url: str, runner: AgentRunner, at_once: int
    ) -> None:
        self.sessions = sessions
        self.base_url = base_url
        self.places = asyncio.Semaphore(at_once)
        self._agent = agent
        self._runner = runner
        self._failures = 0

    async def played(self, task: AgentTask, session: AgentSession, over: asyncio.Event) -> AgentResult:
        """Plays one attempt with an agent and returns its result.

        The agent has agent.timeout_s seconds for its first request, and again agent.timeout_s seconds after the first
        answer. The wait for the first answer has no limit, because the engine may hold the prompt back until new
        weights arrive. The caller sets ``over`` when a limit ends the episode; the agent then has `GRACE_S` more
        seconds.
        """
        playing = asyncio.create_task(self._runner.play(task))
        limit_s = self._agent.timeout_s
        try:
            await _until(playing, task.began)
            in_time = await _until(playing, session.asked, timeout_s=limit_s)
            if in_time:
                await _until(playing, session.answered)
                in_time = await _until(playing, over, timeout_s=limit_s)
            if not in_time:
                message = f"the agent did not end within agent.timeout_s={limit_s:g} s"
                return AgentResult(failed=message, ended="episode_timeout")
            if not await _until(playing, timeout_s=agent_process.GRACE_S):
                return AgentResult(failed="the agent still runs after the end of its episode")
            return playing.result()
        finally:
            playing.cancel()  # the cancellation also ends the agent
            await asyncio.wait([playing], timeout=END_S)

    def log_failure(self, record: EpisodeRecord, result: AgentResult) -> None:
        """Logs the output of a failed attempt; only the first `LOGGED_FAILURES` attempts are logged."""
        self._failures += 1
        if self._failures <= LOGGED_FAILURES:
            log.warning("%s: %s. All that its agent wrote:\n%s", record.uid, record.failed, result.output)


async def _until(playing: asyncio.Task[AgentResult], *events: asyncio.Event, timeout_s: float | None = None) -> bool:
    """Waits until an attempt ends or one of the events is set; returns False after the timeout."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait([playing, *waits], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return bool(done)


@asynccontextmanager
async def agent_host(
    config: RelaxConfig, tokenizer: PromptTokenizer, *, folder: Path, rank: int, token: str
) -> AsyncIterator[AgentHost]:
    """Serves the endpoint of rollout worker ``rank`` while the context is open, and then ends its agents.

    ``folder`` stores the files of agents. Without an agent command, external agents open sessions with ``token``.
    Raises OSError if the address of the endpoint cannot be bound.
    """
    endpoint, at_once = config.endpoint, max_concurrent_agents(config)
    command = agent_command_of(config, find_env(config.env.name))
    sessions = SessionTable(most=at_once)
    outside = None if command else ExternalAgents(token=token, idle_s=config.agent.timeout_s / 2)
    app = EndpointApp(
        sessions,
        tokenizer,
        model=config.model.name,
        max_body_bytes=MAX_BODY_BYTES,
        outside=outside,
    )
    async with served(app, host=endpoint.host, port=endpoint.port and endpoint.port + rank) as base_url:
        if endpoint.host in _ANY_ADDRESS:  # clients cannot connect to a wildcard address
            base_url = f"http://{socket.gethostname()}:{base_url.rpartition(':')[2]}"
        if outside is None:
            log.info("the endpoint for agents is %s", base_url)
        else:
            file = write_address(Path(config.run.dir), rank=rank, base_url=base_url, token=token)
            log.warning("external agents get their tasks at %s%s; the address is in %s", base_url, SESSIONS, file)
        runner = outside or _runner(command, config.agent, folder)
        try:
            yield AgentHost(config.agent, sessions, base_url=base_url, runner=runner, at_once=at_once)
        finally:
            await runner.aclose()


def _runner(command: Sequence[str], agent: AgentConfig, folder: Path) -> AgentRunner:
    return (
        AgentWorkerPool(command, agent, folder=folder)
        if agent.workers
        else OneShotAgentRunner(command, agent, folder=folder)
    )
