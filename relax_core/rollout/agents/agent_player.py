"""Plays the episodes of a group with agents; each attempt at an episode has a separate session at the endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.engine import SamplingParams
from relax_core.contracts.env import REWARDED_ENDS, Ended, EpisodeLimits, TurnsConfig
from relax_core.engines.engine_pool import EnginePool
from relax_core.rollout.agent_processes.agent_process import shown_output
from relax_core.rollout.agent_processes.agent_tasks import AgentResult, AgentTask
from relax_core.rollout.agents.agent_host import AgentHost
from relax_core.rollout.agents.agent_session import AgentSession, SessionForm, tool_form
from relax_core.rollout.episodes.episode_records import EpisodeRecord
from relax_core.rollout.episodes.group_player import EarlyEnds, GroupInPlay, GroupPlayer, PlayEpisode
from relax_core.rollout.episodes.shared_requests import SharedRequests, start_in
from relax_core.rollout.prompt_tokens import AdmittedPrompt, PromptMaker

# Names of the session counts that become metrics.
COUNTS = ("requests", "repeated", "foreign", "segments", "wishes", "cut_behind_stop")
Reached = Callable[[int], Awaitable[None]]


async def _no_wait(version: int) -> None: ...


class AgentPlayer(GroupPlayer):
    """Plays the groups of an env with agents; ``host`` sends the tasks to the agents.

    All sessions have the same ``form``. ``reached(version)`` returns when the run has reached this weight version. The
    agents of a group start after this call.
    """

    def __init__(
        self,
        host: AgentHost,
        form: SessionForm,
        *,
        group_size: int,
        max_retries: int,
        seed: int,
        ends: EarlyEnds | None = None,
        reached: Reached = _no_wait,
        in_order: bool = False,
    ) -> None:
        super().__init__(group_size, seed=seed, max_retries=max_retries, ends=ends, in_order=in_order)
        self._host = host
        self._form = form
        self._reached = reached

    @asynccontextmanager
    async def opened(self, group: GroupInPlay) -> AsyncIterator[PlayEpisode]:
        """Waits for the weight version of the group. A cancelled attempt cancels its own requests."""
        await self._reached(group.start.request.min_version)
        yield partial(self._play, group)

    async def _play(self, group: GroupInPlay, sample: int) -> None:
        """Plays one episode to its end; starts a new attempt if the agent fails."""
        while True:
            async with self._host.places:
                await self._attempt(group, sample)
            if not self.try_restart(group.records[sample]):
                return

    async def _attempt(self, group: GroupInPlay, sample: int) -> None:
        """Plays one attempt in a new session; the agent's key gives access to this session only."""
        start, record = group.start, group.records[sample]
        over = asyncio.Event()
        given_up: list[str] = []  # engine requests to cancel

        def limited(rids: list[str]) -> None:
            given_up.extend(rids)
            over.set()

        session = AgentSession(
            self._form,
            record,
            request_of=lambda number, ids, most: self.begin_turn(group, sample, ids, most, number=number),
            tie=start.index,
            tasks=group.tasks,
            on_response=partial(self._answered, group, record),
            on_end=limited,
            ends_early=lambda: self._stale(start, record),
        )
        key = self._host.sessions.open(session)
        task = AgentTask(
            uid=record.uid,
            attempt=start.attempt + record.restarts,
            row=start.row,
            key=key,
            base_url=self._host.base_url,
            evaluation=bool(start.evaluation),
            quiet_s=lambda: 0.0 if session.under_way else time.monotonic() - session.seen_s,
        )
        began_s = time.monotonic()
        try:
            result = await self._host.played(task, session, over)
        finally:
            given_up += session.end()
            self._host.sessions.close(key)
            record.counts.update({name: session.counts[name] for name in COUNTS})
            record.env_s += max(0.0, time.monotonic() - began_s - record.engine_s)
            if given_up:  # in the background, because a busy engine confirms a cancellation late
                start_in(group.tasks, self._form.requests.cancel(given_up))
        self._conclude(record, result)

    def _answered(self, group: GroupInPlay, record: EpisodeRecord, rid: str) -> None:
        group.flight.remove_request(group.start.index, rid)
        if record.turns:
            self._too_old.sampled(int(record.turns[-1].response.versions[-1]))

    def _stale(self, start: AdmittedPrompt, record: EpisodeRecord) -> tuple[Ended, str] | None:
        message = self.stale_reason(start, record)
        if not message:
            return None
        record.failed = message
        return "stale", f"the episode is too old to be trained: {message}"

    def _conclude(self, record: EpisodeRecord, result: AgentResult) -> None:
        """Ends an episode with its agent's result; ignores a failure of the agent if a limit has ended the episode."""
        limited = record.ended in REWARDED_ENDS
        if record.ended is not None and not limited:
            return
        if result.failed and not limited:
            record.fail(result.ended, result.failed)
        elif not record.turns:
            record.fail("env_failed", f"the agent took no answer of the model; {shown_output(result.output)}")
        else:
            record.ended = record.ended or "env_done"
            if not result.failed:
                record.own_reward = result.reward
                record.take_info(result.metrics)
        if record.failed:
            self._host.log_failure(record, result)


def agent_player(
    config: RelaxConfig,
    host: AgentHost,
    prompts: PromptMaker,
    pool: EnginePool,
    sampling: SamplingParams,
    *,
    seed: int,
    ends: EarlyEnds | None = None,
    reached: Reached | None = None,
    in_order: bool = False,
) -> AgentPlayer:
    """Returns the player of a run's agents; a group has ``sampling.n`` episodes."""
    env, agent = cast(TurnsConfig, config.env), config.agent
    tools, refused = tool_form(prompts.tokenizer, as_text=env.tools_as == "text")
    form = SessionForm(
        prompts=prompts,
        requests=SharedRequests(pool, sampling),
        tools=tools,
        tools_refused=refused,
        limits=EpisodeLimits(
            turns=env.max_turns,
            sampled_tokens=sampling.max_new_tokens,
            context_tokens=prompts.max_prompt_tokens + sampling.max_new_tokens,
        ),
        stop=tuple(sampling.stop),
        max_turn_tokens=env.max_turn_tokens,
        history="template" if agent.history == "template" else "continue",
        sampling={"temperature": sampling.temperature, "top_p": sampling.top_p},
    )
    return AgentPlayer(
        host,
        form,
        group_size=sampling.n,
        max_retries=env.max_retries,
        seed=seed,
        ends=ends,
        reached=reached or _no_wait,
        in_order=in_order,
    )
