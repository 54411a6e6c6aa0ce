"""The loop of a rollout worker: admissions → prompts → engine → rewards → complete groups on the bus.

The loop never waits for the trainer. It asks for admissions one step ahead, and the engine holds prompts that must not
start yet.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from relax_core.contracts.bus import Admission, Group
from relax_core.contracts.data import BadRow, PromptSource
from relax_core.contracts.engine import Generated
from relax_core.contracts.tree import TRUNCATED, group_uid
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.protocol.frames import StreamEnd
from relax_core.observe.sample_log import SampleLog
from relax_core.rollout.bad_rows import BadRows
from relax_core.rollout.episodes.episode_records import (
    EpisodeRecord,
    PlayedFigures,
    one_turn_episodes,
    played_values,
    score_episodes,
)
from relax_core.rollout.episodes.group_assembly import (
    DroppedGroup,
    GroupFilter,
    MakeExtras,
    complete_group,
    tell_lost,
    token_accounts,
)
from relax_core.rollout.episodes.played_group import GroupPlayer, GroupStart
from relax_core.rollout.episodes.shared_requests import BatchOrder, Lockstep, LockstepOrder, start_in
from relax_core.rollout.prompt_admissions import AdmissionBus, AdmittedPrompt, PromptAdmissions, RolloutLoopSettings
from relax_core.rollout.prompt_tokens import PromptMaker, check_prompt_tokens
from relax_core.rollout.rewards.reward_failures import FailedGroups, TruncatedGroups
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.teacher_choice import TeacherOf
from relax_core.rollout.weight_update_handler import WeightUpdateHandler

Record = Callable[[str, int, Mapping[str, float]], None]


class RolloutBus(AdmissionBus, Protocol):
    """Declares the calls of the bus that the rollout's event loop makes."""

    async def put(self, rows: Sequence[Group], *, timeout_s: float) -> None:
        """Puts complete groups into the bus."""


class RolloutLoop:
    """Is the loop of one rollout worker.

    ``gate(version)`` returns when no evaluation must come before prompts of that version. ``bad_rows`` counts the data
    rows that cannot be used. ``teacher_of`` chooses the teacher of a data row for algorithms with teachers.
    ``weight_update_handler`` is set if groups may end or restart with a weight version. ``advantages`` computes a
    complete group's advantages if no role does so. ``player`` plays the episodes of an env of several turns.
    ``samples`` keeps what becomes of every group.
    """

    def __init__(
        self,
        *,
        bus: RolloutBus,
        pool: EnginePool,
        source: PromptSource,
        prompts: PromptMaker,
        rewards: RewardPool,
        settings: RolloutLoopSettings,
        record: Record,
        gate: Callable[[int], Any],
        bad_rows: BadRows,
        refuse: GroupFilter | None = None,
        teacher_of: TeacherOf | None = None,
        weight_update_handler: WeightUpdateHandler | None = None,
        advantages: MakeExtras | None = None,
        player: GroupPlayer | None = None,
        samples: SampleLog | None = None,
    ) -> None:
        self._bus = bus
        self._pool = pool
        self._prompts = prompts
        self._rewards = rewards
        self._settings = settings
        self._record = record
        self._gate = gate
        self._refuse = refuse
        self._weight_update_handler = weight_update_handler
        self._advantages = advantages
        self._player = player
        self._samples, self._lost = samples, None if samples is None else samples.lost
        self._admissions = PromptAdmissions(
            bus=bus,
            source=source,
            prompts=prompts,
            settings=settings,
            bad_rows=bad_rows,
            teacher_of=teacher_of,
            check_row=rewards.check_row,
            weight_update_handler=weight_update_handler,
            opens_itself=player is not None,
        )
        self._newest_played: dict[int, asyncio.Task[PlayedFigures | None]] = {}  # by weight version
        self._cancelled: list[PlayedFigures] = []  # of groups that were given up since the last record
        self._order = LockstepOrder() if settings.lockstep else BatchOrder()
        self._sampled_tokens: Counter[str] = Counter()  # of episodes of several turns, by what became of them
        self._truncated_groups = TruncatedGroups(settings.sampling.max_new_tokens)
        self._failed_groups = FailedGroups(settings.max_failed_groups)
        self._staged: list[Group] = []
        self._flushing = False
        self._newest_group: asyncio.Task[float] | None = None  # the group whose responses arrived last

    async def run(self, reclaimed: Sequence[Admission]) -> None:
        """Runs until the bus closes (BusClosed) or a prompt batch fails (its error); leaves no prompt batch running."""
        prompt_batch = self._settings.batch_prompts
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._weight_update_handler is not None:
                    tasks.create_task(self._weight_update_handler.run())
                for start in range(0, len(reclaimed), prompt_batch):
                    await self._begin(reclaimed[start : start + prompt_batch], tasks)
                while True:
                    await self._begin(await self._admissions.next(), tasks)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # the first failure cancelled the other tasks

    async def _begin(self, admissions: Sequence[Admission], tasks: asyncio.TaskGroup) -> None:
        """Makes prompts and starts their batches, beside later admissions if these need not wait for the encoding."""
        admitted = self._admissions.prompts(admissions)
        launched = self._launch(admitted, tasks)
        if self._admissions.go_on:
            start_in(tasks, launched, admitted)
        else:
            await launched

    async def _launch(self, admitted: Coroutine[Any, Any, Sequence[AdmittedPrompt]], tasks: asyncio.TaskGroup) -> None:
        """Starts a prompt batch for each weight version that these prompts wait for.

        Each batch waits at the gate separately: a group that replaces a dropped one may be what an evaluation waits for
        that holds the others at the gate.
        """
        by_version: dict[int, list[AdmittedPrompt]] = defaultdict(list)
        for prompt in await admitted:
            by_version[prompt.request.min_version].append(prompt)
        for version in sorted(by_version):
            prompt_batch = self._prompt_batch if self._player is None else self._played_prompt_batch
            for prompts in self._order.batches(version, by_version[version]):
                start_in(tasks, prompt_batch(version, prompts, tasks))

    async def _prompt_batch(self, version: int, prompts: Sequence[AdmittedPrompt], tasks: asyncio.TaskGroup) -> None:
        """Sends one engine request for prompts of one weight version; each group leaves when it is complete."""
        await self._gate(version)
        start = time.perf_counter()
        unanswered = {prompt.index for prompt in prompts}
        if self._weight_update_handler is not None:  # some groups may have ended since they were admitted
            prompts = [prompt for prompt in prompts if self._weight_update_handler.begin(prompt.index, prompt.request)]
        samples = tokens = newest = 0
        engine: list[StreamEnd] = []
        groups: list[asyncio.Task[float]] = []
        async for number, responses in self._pool.generate(
            [prompt.request for prompt in prompts],
            self._settings.sampling,
            places=[prompt.index for prompt in prompts],
            on_end=engine.append,
        ):
            prompt = prompts[number]
            check_prompt_tokens(prompt.request, responses)
            unanswered.discard(prompt.index)
            if responses[0].prefill_ms:  # SGLang does not report it
                self._admissions.figures.add(prompt.modality, "prefill", responses[0].prefill_ms)
            if self._weight_update_handler is not None:
                self._weight_update_handler.end(prompt.index)
            samples += len(responses)
            tokens += sum(len(response.output_ids) for response in responses)
            newest = max(newest, int(responses[-1].versions[-1]))
            self._newest_group = tasks.create_task(self._score_and_stage(prompt, responses, tasks, self._newest_group))
            groups.append(self._newest_group)
        for index in unanswered:  # these were given up
            self._prompts.release(group_uid(index))
        reward_s = sum(await asyncio.gather(*groups))
        if not samples:  # every group was given up
            return
        values = {
            "generate_ms": 1e3 * (time.perf_counter() - start),
            "engine_ms": max((end.prefill_ms + end.decode_ms for end in engine), default=0.0),
            "held_ms": max((end.held_ms for end in engine), default=0.0),
            "reward_ms": 1e3 * reward_s,
            "reward_failed": self._rewards.failures.share,
            "samples": samples,
            "tokens": tokens,
        }
        if self._weight_update_handler is not None:
            values["aborts"] = self._weight_update_handler.aborts  # aborted groups since the loop began
        if self._prompts.items is not None and engine:
            values["tower_passes"] = max(end.tower_passes for end in engine)
            values["feature_mb"] = max(end.media_feature_bytes for end in engine) / 1e6
        self._record("rollout", newest, values | self._admissions.media_figures())

    async def _played_prompt_batch(
        self, version: int, prompts: Sequence[AdmittedPrompt], tasks: asyncio.TaskGroup
    ) -> None:
        """Plays the groups of an env of several turns; a group leaves when its episodes have ended."""
        assert self._player is not None
        async with self._order.turn(version):
            await self._gate(version)
            lockstep = None
            if self._settings.lockstep:
                lockstep = self._player.lockstep([group_uid(prompt.index) for prompt in prompts])
                tasks.create_task(lockstep.run())
            await self._play_batch(version, prompts, tasks, lockstep)

    async def _play_batch(
        self, version: int, prompts: Sequence[AdmittedPrompt], tasks: asyncio.TaskGroup, lockstep: Lockstep | None
    ) -> None:
        """Plays groups, each at its own pace or with ``lockstep``, and records their figures."""
        start = time.perf_counter()
        groups = []
        # Groups that were handed on are forgotten, because a run has many weight versions.
        self._newest_played = {of: group for of, group in self._newest_played.items() if not group.done()}
        for prompt in prompts:
            before = self._newest_played.get(version)
            group = tasks.create_task(self._play_and_stage(prompt, tasks, before, lockstep=lockstep))
            if self._weight_update_handler is not None and not self._weight_update_handler.begin_episodes(
                prompt.index, group.cancel
            ):
                group.cancel()  # the group ended before its episodes began
                continue
            self._newest_played[version] = group
            groups.append(group)
        if not groups:
            return
        await asyncio.wait(groups)
        played = [one for group in groups if not group.cancelled() and (one := group.result()) is not None]
        if not played:
            return
        played += self._cancelled
        self._cancelled = []
        values = {
            "generate_ms": 1e3 * (time.perf_counter() - start),
            "reward_ms": 1e3 * sum(one.reward_s for one in played),
            "reward_failed": self._rewards.failures.share,
            **played_values(played),
            **{f"tokens/{reason}": float(count) for reason, count in self._sampled_tokens.items()},
        }
        if self._weight_update_handler is not None:
            values["aborts"] = self._weight_update_handler.aborts
        self._record("rollout", max(one.newest_version for one in played), values | self._admissions.media_figures())

    def _count_cancelled(self, index: int, records: Sequence[EpisodeRecord]) -> None:
        """Counts the episodes of a group that is given up, and their tokens, none of which is trained; keeps them."""
        self._sampled_tokens.update(token_accounts(records, None))
        if self._lost is not None:
            tell_lost(self._lost, group_uid(index), records, reason="cancelled")
        self._cancelled.append(PlayedFigures.of(records, reward_s=0.0))

    async def _play_and_stage(
        self,
        prompt: AdmittedPrompt,
        tasks: asyncio.TaskGroup,
        before: asyncio.Task[PlayedFigures | None] | None,
        *,
        lockstep: Lockstep | None,
    ) -> PlayedFigures | None:
        """Plays and scores a group and hands it to the bus; returns None if its opening cannot be used."""
        assert self._player is not None
        handler = self._weight_update_handler
        start = GroupStart(
            index=prompt.index,
            attempt=prompt.attempt,
            row=prompt.row,
            where=prompt.where,
            rid=prompt.request.rid,
            min_version=prompt.request.min_version,
            on_request=(lambda rid: None) if handler is None else partial(handler.turn_begins, prompt.index),
            on_response=(lambda rid: None) if handler is None else partial(handler.turn_ends, prompt.index),
            on_cancelled=partial(self._count_cancelled, prompt.index),
            lockstep=lockstep,
        )
        try:
            records = await self._player.play(start, tasks)
        except BadRow as error:
            await self._admissions.leave_out(prompt.index, prompt.number, error)
            return None
        except asyncio.CancelledError:
            self._prompts.release(group_uid(prompt.index))
            raise
        if handler is not None:
            handler.end(prompt.index)
        bad = next((one.bad_media for one in records if one.bad_media is not None), None)
        self._admissions.played(prompt.number, bad)
        reward_s = await self._score(prompt, records)
        if self._settings.in_order and before is not None:
            await asyncio.wait([before])
        done = self._complete(prompt, records)
        await self._hand_on(done, tasks)
        return PlayedFigures.of(records, reward_s=reward_s)

    async def _score_and_stage(
        self,
        prompt: AdmittedPrompt,
        responses: Sequence[Generated],
        tasks: asyncio.TaskGroup,
        before: asyncio.Task[float] | None,
    ) -> float:
        """Scores a group and hands it to the bus; returns the seconds that the rewards took.

        It runs in its own task, so that a slow reward delays neither other groups nor the engine. ``before`` is the
        group whose responses arrived before these.
        """
        records = one_turn_episodes(
            group_uid(prompt.index),
            prompt.request,
            responses,
            tokenizer=self._prompts.tokenizer,
            stop=self._settings.sampling.stop,
        )
        reward_s = await self._score(prompt, records)
        if self._settings.in_order and before is not None:
            await before
        done = self._complete(prompt, records)
        await self._hand_on(done, tasks)
        return reward_s

    async def _score(self, prompt: AdmittedPrompt, episodes: Sequence[EpisodeRecord]) -> float:
        """Scores the ended episodes of a group; returns the seconds that the rewards took."""
        began = time.perf_counter()
        folder = self._settings.media_folder
        await score_episodes(episodes, self._rewards, row=prompt.row, where=prompt.where, media_folder=folder)
        reasons = [one.output.reason if one.reward is None else None for one in episodes]
        self._failed_groups.record(reasons, where=prompt.where)
        return time.perf_counter() - began

    def _complete(self, prompt: AdmittedPrompt, episodes: Sequence[EpisodeRecord]) -> Group | DroppedGroup:
        return complete_group(
            index=prompt.index,
            episodes=episodes,
            refuse=self._refuse,
            teacher=prompt.teacher,
            mask_off_policy=self._settings.mask_off_policy,
            mask_truncated=self._settings.mask_truncated,
            extras=self._advantages,
            lost=self._lost,
            account=self._sampled_tokens.update,
        )

    async def _hand_on(self, done: Group | DroppedGroup, tasks: asyncio.TaskGroup) -> None:
        self._truncated_groups.record(isinstance(done, DroppedGroup) and done.reason == TRUNCATED)
        if isinstance(done, DroppedGroup):
            await self._bus.drop(done.group_uid, reason=done.reason, timeout_s=self._settings.call_timeout_s)
            self._prompts.release(done.group_uid)
            return
        if self._samples is not None:
            self._samples.put(done)
        self._staged.append(done)
        if not self._flushing:
            self._flushing = True
            tasks.create_task(self._flush())

    async def _flush(self) -> None:
        """Puts all staged groups; groups staged meanwhile go with the next put, so a prompt batch costs one or two."""
        await asyncio.sleep(0)
        while self._staged:
            rows, self._staged = self._staged, []
            await self._bus.put(rows, timeout_s=self._settings.call_timeout_s)
            for row in rows:  # from here on the bus keeps their images and videos
                self._prompts.release(row.group_uid)
        self._flushing = False
