"""Plays groups: defines the base class of all players, and the player for episodes of one turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from relax_core.bus.staleness import StalenessCheck
from relax_core.config.rollout_checks import EVALUATED_TOGETHER
from relax_core.contracts.data import BadRow
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.env import REWARDED_ENDS, Ended
from relax_core.contracts.media import Media
from relax_core.contracts.tree import sample_uid
from relax_core.engines.engine_pool import EnginePool, OnEnd
from relax_core.rollout.episodes.episode_records import EpisodeRecord, one_turn_episodes
from relax_core.rollout.episodes.shared_requests import Lockstep, SharedRequests, start_in
from relax_core.rollout.partial_rollout import GroupsInFlight
from relax_core.rollout.prompt_tokens import AdmittedPrompt, PromptMaker, check_prompt_tokens

Played = tuple[AdmittedPrompt, list[EpisodeRecord] | BadRow]
GivenUp = Callable[[AdmittedPrompt, Sequence[EpisodeRecord]], None]
SAMPLES_A_CALL = 16384  # samples of an evaluation in one request; the limit of a request is four times larger
NOT_FOLLOWED = GroupsInFlight()
# After these ends of an attempt, the episode starts again from its reset, because the failure may be temporary.
RESTARTABLE_ENDS: frozenset[Ended | None] = frozenset({"env_failed", "step_timeout"})


def forget(prompt: AdmittedPrompt, episodes: Sequence[EpisodeRecord]) -> None:
    """Ignores the episodes of a cancelled group."""


def cancelled(records: Sequence[EpisodeRecord]) -> Sequence[EpisodeRecord]:
    """Ends the episodes of a cancelled group, and returns them."""
    for record in records:
        if record.ended is None:
            record.fail("cancelled", "the group was cancelled")
    return records


@dataclass(frozen=True, kw_only=True)
class EarlyEnds:
    """Holds the rules that end training episodes before their env ends them.

    A group is complete when the share ``quorum`` of its episodes has ended with a reward; the remaining episodes end as
    stragglers. An episode is too old to be trained if its oldest token is more than ``max_lag`` weight versions older
    than the newest version seen. Such an episode ends before its next turn. None means no limit.
    """

    quorum: float = 1.0
    max_lag: int | None = None

    def needed(self, group_size: int) -> int:
        """Returns how many episodes of a group must end with a reward."""
        return math.ceil(round(self.quorum * group_size, 6))


@dataclass(eq=False, kw_only=True)
class GroupInPlay:
    """Holds a group while its episodes are played; `GroupPlayer.groups` explains ``tasks`` and ``flight``."""

    start: AdmittedPrompt
    records: list[EpisodeRecord]
    tasks: asyncio.TaskGroup
    flight: GroupsInFlight
    lockstep: Lockstep | None


PlayEpisode = Callable[[int], Coroutine[Any, Any, None]]


class GroupPlayer:
    """Plays the groups of a run or an evaluation; a group has ``group_size`` episodes.

    With ``in_order``, groups are yielded in the order of their prompts, which is equal in every run. With ``lockstep``,
    the turns of a prompt batch are sent together through ``requests``, and the batches of a weight version are played
    one after the other. Later prompts of a weight version replace dropped groups. The number of later prompts that
    arrive together depends on timing, so each later prompt is a separate batch.
    """

    makes_prompts = True  # prompts are made while the episodes are played
    evaluated_together = EVALUATED_TOGETHER  # the largest number of open episodes in an evaluation

    def __init__(
        self,
        group_size: int,
        *,
        seed: int = 0,
        max_retries: int = 0,
        ends: EarlyEnds | None = None,
        in_order: bool = False,
        lockstep: bool = False,
        requests: SharedRequests | None = None,
    ) -> None:
        self.group_size = group_size
        self._seed = seed
        self._max_retries = max_retries
        self._ends = ends or EarlyEnds()
        self._too_old = StalenessCheck(self._ends.max_lag)
        self._in_order = in_order
        self._requests = requests
        self._turns: dict[int, asyncio.Lock] | None = {} if lockstep else None  # by weight version

    async def play(
        self,
        start: AdmittedPrompt,
        tasks: asyncio.TaskGroup,
        *,
        flight: GroupsInFlight = NOT_FOLLOWED,
        given_up: GivenUp = forget,
        lockstep: Lockstep | None = None,
    ) -> list[EpisodeRecord]:
        """Returns the ended episodes of a group in order; `groups` explains the parameters."""
        records = [EpisodeRecord(uid=uid) for uid in self.uids(start)]
        group = GroupInPlay(start=start, records=records, tasks=tasks, flight=flight, lockstep=lockstep)
        try:
            async with self.opened(group) as play, asyncio.TaskGroup() as playing:
                own = {
                    playing.create_task(play(sample)): record
                    for sample, record in enumerate(records)
                    if record.ended is None
                }
                if self._ends.quorum < 1.0 and not start.evaluation:
                    playing.create_task(self._end_stragglers(group, own))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # the first failure cancelled the other tasks
        except asyncio.CancelledError:
            given_up(start, cancelled(records))
            raise
        return records

    def opened(self, group: GroupInPlay) -> AbstractAsyncContextManager[PlayEpisode]:
        """Opens a group while the context is open. Yields a function that plays the episode with a given number.

        If an episode has already ended, `play` does not call the function for it.
        """
        raise NotImplementedError

    async def _end_stragglers(self, group: GroupInPlay, playing: Mapping[asyncio.Task[None], EpisodeRecord]) -> None:
        """Waits for the quorum of a group, then cancels the tasks of the other episodes.

        Returns when all tasks are done or cancelled.
        """
        pending, needed = set(playing), self._ends.needed(self.group_size)
        while pending and sum(record.ended in REWARDED_ENDS for record in playing.values()) < needed:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if not pending:
            return
        for task in pending:
            task.cancel()
            playing[task].fail("straggler", "the group was complete without the episode (rollout.quorum)")
        self.give_up(group, [playing[task] for task in pending])

    def give_up(self, group: GroupInPlay, records: Sequence[EpisodeRecord]) -> None:
        """Cancels the requests in flight of episodes that no longer need the responses.

        Returns at once, because a busy engine confirms the cancellation late.
        """
        asked = [record.request for record in records if record.request]
        if asked and self._requests is not None:
            start_in(group.tasks, self._requests.cancel(asked))
        for request in asked:
            group.flight.remove_request(group.start.index, request)

    def try_restart(self, record: EpisodeRecord) -> bool:
        """Prepares a failed episode for a new start; returns False if a new start is not possible or not needed."""
        if record.ended not in RESTARTABLE_ENDS or record.restarts >= self._max_retries:
            return False
        record.start_again()
        return True

    def stale_reason(self, start: AdmittedPrompt, record: EpisodeRecord) -> str:
        """Returns why an episode is too old to be trained; empty if it can still be trained."""
        return "" if start.evaluation else self._too_old.describe(record.uid, record.turn_versions())

    def begin_turn(
        self,
        group: GroupInPlay,
        sample: int,
        prompt_ids: list[int],
        most: int,
        *,
        number: int,
        media: Sequence[Media] = (),
    ) -> PromptRequest:
        """Makes the request for response ``number`` with at most ``most`` tokens, and adds it to ``group.flight``."""
        start, restarts = group.start, group.records[sample].restarts
        again = f".{restarts}" if restarts else ""
        request = PromptRequest(
            rid=f"{start.request.rid}.{sample}.{number}{again}",
            input_ids=prompt_ids,
            sampling_seed=start.seed(self._seed, f"train/{sample}/{number}"),
            min_version=start.request.min_version,
            media=list(media),
            max_new_tokens=most,
        )
        group.flight.add_request(start.index, request.rid)
        return request

    async def groups(
        self,
        prompts: Sequence[AdmittedPrompt],
        tasks: asyncio.TaskGroup,
        *,
        flight: GroupsInFlight = NOT_FOLLOWED,
        given_up: GivenUp = forget,
        on_end: OnEnd | None = None,
        at_once: int | None = None,
    ) -> AsyncIterator[Played]:
        """Yields each prompt with its ended episodes in order; all prompts must have the same weight version.

        If the env cannot use the data row, the prompt is yielded with a `BadRow` in place of episodes. ``flight``
        receives a report of each group and request, and may cancel groups. A cancelled group is not yielded;
        ``given_up`` receives its episodes. ``on_end`` receives the metrics of engine requests. ``on_end`` is called
        only by players that send a prompt batch as one request. At most ``at_once`` groups are open at the same time. A
        failure of the engines ends ``tasks``.
        """
        if not prompts:
            return
        if self._turns is None:
            async for played in self._together(prompts, tasks, flight, given_up, at_once=at_once):
                yield played
            return
        version = prompts[0].request.min_version
        size = at_once or len(prompts)
        if version in self._turns:
            size = 1
        else:
            self._turns = {of: turn for of, turn in self._turns.items() if of >= version - 1}
            self._turns[version] = asyncio.Lock()
        for first in range(0, len(prompts), size):
            async with self._turns[version]:
                part = prompts[first : first + size]
                async for played in self._together(part, tasks, flight, given_up, lockstep=self.lockstep(part)):
                    yield played

    def lockstep(self, prompts: Sequence[AdmittedPrompt]) -> Lockstep:
        """Returns an object that sends the turns of these groups together while a task executes its method `run`."""
        assert self._requests is not None
        return Lockstep(self._requests, [uid for prompt in prompts for uid in self.uids(prompt)])

    def uids(self, prompt: AdmittedPrompt) -> list[str]:
        """Returns the uids of a group's episodes."""
        return [sample_uid(prompt.uid, sample) for sample in range(self.group_size)]

    async def _together(
        self,
        prompts: Sequence[AdmittedPrompt],
        tasks: asyncio.TaskGroup,
        flight: GroupsInFlight,
        given_up: GivenUp,
        *,
        at_once: int | None = None,
        lockstep: Lockstep | None = None,
    ) -> AsyncIterator[Played]:
        limit = asyncio.Semaphore(at_once or len(prompts))

        async def played(prompt: AdmittedPrompt) -> list[EpisodeRecord] | BadRow:
            async with limit:
                try:
                    found = await self.play(prompt, tasks, flight=flight, given_up=given_up, lockstep=lockstep)
                except BadRow as error:
                    return error
            flight.end(prompt.index)
            return found

        if lockstep is not None:
            tasks.create_task(lockstep.run())
        playing: dict[asyncio.Task[list[EpisodeRecord] | BadRow], AdmittedPrompt] = {}
        ended: asyncio.Queue[asyncio.Task[list[EpisodeRecord] | BadRow]] = asyncio.Queue()
        for prompt in prompts:
            task = tasks.create_task(played(prompt))
            if not flight.begin(prompt.index, task.cancel):  # the bus ended the group before its episodes began
                task.cancel()
                if lockstep is not None:
                    lockstep.leave(self.uids(prompt))
                continue
            playing[task] = prompt
            task.add_done_callback(ended.put_nowait)
        for task in list(playing):
            if self._in_order:
                await asyncio.wait([task])
            else:
                task = await ended.get()
            if not task.cancelled():
                yield playing[task], task.result()


class OneTurnPlayer(GroupPlayer):
    """Plays episodes of one turn without an environment; a prompt batch is one engine request.

    Groups are yielded in the order in which their responses arrive. ``prompts`` has the tokenizer that decodes
    responses.
    """

    makes_prompts = False
    evaluated_together = SAMPLES_A_CALL

    def __init__(self, *, prompts: PromptMaker, pool: EnginePool, sampling: SamplingParams) -> None:
        super().__init__(sampling.n)
        self._prompts = prompts
        self._pool = pool
        self._sampling = sampling

    async def groups(  # noqa: D102
        self,
        prompts: Sequence[AdmittedPrompt],
        tasks: asyncio.TaskGroup,
        *,
        flight: GroupsInFlight = NOT_FOLLOWED,
        given_up: GivenUp = forget,
        on_end: OnEnd | None = None,
        at_once: int | None = None,
    ) -> AsyncIterator[Played]:
        size = at_once or max(1, len(prompts))
        for first in range(0, len(prompts), size):
            part = prompts[first : first + size]
            begun = [
                admitted for admitted in part if flight.begin(admitted.index)
            ]  # some groups may have ended after their admission
            for prompt in begun:
                flight.add_request(prompt.index, prompt.request.rid)
                if prompt.evaluation:  # a training prompt already holds its media
                    await self._prompts.hold_again(prompt.row, prompt.request.media, owner=prompt.uid)
            unanswered = {prompt.uid: prompt for prompt in part}
            async for number, responses in self._pool.generate(
                [admitted.request for admitted in begun],
                self._sampling,
                places=[admitted.index for admitted in begun],
                on_end=on_end,
            ):
                prompt = begun[number]
                check_prompt_tokens(prompt.request, responses)
                flight.end(prompt.index)
                del unanswered[prompt.uid]
                yield prompt, self._episodes(prompt, responses)
            for prompt in unanswered.values():
                given_up(prompt, [])

    def _episodes(self, prompt: AdmittedPrompt, responses: Sequence[Generated]) -> list[EpisodeRecord]:
        tokenizer, stop = self._prompts.tokenizer, self._sampling.stop
        return one_turn_episodes(prompt.uid, prompt.request, responses, tokenizer=tokenizer, stop=stop)
