"""The loop of a rollout worker: admissions → prompts → episodes → rewards → complete groups on the bus.

The loop never waits for the trainer. It asks for admissions one step ahead, and the engine holds prompts that must not
start yet.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from relax_core.contracts.bus import Admission, Group
from relax_core.contracts.data import BadRow, PromptSource
from relax_core.contracts.tree import TRUNCATED
from relax_core.engines.protocol.generate_messages import StreamEnd
from relax_core.observe.sample_log import SampleLog
from relax_core.rollout.dynamic_sampling import GroupFilter, TruncatedGroups
from relax_core.rollout.episodes.episode_records import (
    EpisodeRecord,
    PlayedFigures,
    played_values,
    score_episodes,
)
from relax_core.rollout.episodes.group_assembly import (
    DroppedGroup,
    MakeExtras,
    complete_group,
    tell_lost,
    token_accounts,
)
from relax_core.rollout.episodes.group_player import GroupPlayer
from relax_core.rollout.episodes.shared_requests import start_in
from relax_core.rollout.partial_rollout import GroupsInFlight, WeightUpdateHandler
from relax_core.rollout.prompt_admissions import (
    AdmissionBus,
    AdmittedPrompt,
    BadRows,
    PromptAdmissions,
    RolloutLoopSettings,
    TeacherOf,
)
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.reward_failures import FailedGroups
from relax_core.rollout.rewards.reward_pool import RewardPool

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
    complete group's advantages if no role does so. ``player`` plays the episodes. ``samples`` keeps what becomes of
    every group.
    """

    def __init__(
        self,
        *,
        bus: RolloutBus,
        source: PromptSource,
        prompts: PromptMaker,
        rewards: RewardPool,
        player: GroupPlayer,
        settings: RolloutLoopSettings,
        record: Record,
        gate: Callable[[int], Any],
        bad_rows: BadRows,
        refuse: GroupFilter | None = None,
        teacher_of: TeacherOf | None = None,
        weight_update_handler: WeightUpdateHandler | None = None,
        advantages: MakeExtras | None = None,
        samples: SampleLog | None = None,
    ) -> None:
        self._bus = bus
        self._prompts = prompts
        self._rewards = rewards
        self._settings = settings
        self._record = record
        self._gate = gate
        self._refuse = refuse
        self._weight_update_handler = weight_update_handler
        self._flight = GroupsInFlight() if weight_update_handler is None else weight_update_handler
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
            flight=self._flight,
            makes_prompts=player.makes_prompts,
        )
        self._cancelled: list[PlayedFigures] = []  # of groups that were given up since the last record
        self._sampled_tokens: Counter[str] = Counter()  # by what became of them
        self._truncated_groups = TruncatedGroups(settings.sampling.max_new_tokens)
        self._failed_groups = FailedGroups(settings.max_failed_groups)
        self._staged: list[Group] = []
        self._flushing = False
        self._newest_group: asyncio.Task[PlayedFigures] | None = None  # the group that came last

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
            start_in(tasks, self._sample(version, by_version[version], tasks))

    async def _sample(self, version: int, prompts: Sequence[AdmittedPrompt], tasks: asyncio.TaskGroup) -> None:
        """Plays the groups of prompts of one weight version; each leaves when it is complete."""
        await self._gate(version)
        start = time.perf_counter()
        requests: list[StreamEnd] = []
        groups: list[asyncio.Task[PlayedFigures]] = []
        async for prompt, episodes in self._player.groups(
            prompts, tasks, flight=self._flight, given_up=self._give_up, on_end=requests.append
        ):
            if isinstance(episodes, BadRow):
                await self._admissions.leave_out(prompt.index, prompt.number, episodes)
                continue
            self._newest_group = tasks.create_task(self._finish(prompt, episodes, tasks, self._newest_group))
            groups.append(self._newest_group)
        if groups:
            played = await asyncio.gather(*groups)
            self._record_figures(played, requests, seconds=time.perf_counter() - start)

    async def _finish(
        self,
        prompt: AdmittedPrompt,
        episodes: Sequence[EpisodeRecord],
        tasks: asyncio.TaskGroup,
        before: asyncio.Task[PlayedFigures] | None,
    ) -> PlayedFigures:
        """Scores a group, makes its token tree and hands it to the bus.

        It runs in its own task, so that a slow reward delays neither other groups nor the engine. ``before`` is the
        group that came before this one.
        """
        self._admissions.played(prompt, episodes)
        reward_s = await self._score(prompt, episodes)
        if self._settings.in_order and before is not None:
            await asyncio.wait([before])
        await self._hand_on(self._complete(prompt, episodes), tasks)
        return PlayedFigures.of(episodes, reward_s=reward_s)

    def _give_up(self, prompt: AdmittedPrompt, episodes: Sequence[EpisodeRecord]) -> None:
        """Counts the episodes of a group that is given up, and their tokens, none of which is trained; keeps them."""
        self._prompts.release(prompt.uid)
        if episodes:
            self._sampled_tokens.update(token_accounts(episodes, None))
            if self._lost is not None:
                tell_lost(self._lost, prompt.uid, episodes, reason="cancelled")
            self._cancelled.append(PlayedFigures.of(episodes, reward_s=0.0))

    def _record_figures(
        self, played: Sequence[PlayedFigures], requests: Sequence[StreamEnd], *, seconds: float
    ) -> None:
        """Records the figures of a prompt batch, and of the groups that were given up since the last record."""
        played = [*played, *self._cancelled]
        self._cancelled = []
        values = {
            "generate_ms": 1e3 * seconds,
            "reward_ms": 1e3 * sum(one.reward_s for one in played),
            "reward_failed": self._rewards.failures.share,
            **played_values(played),
            **{f"tokens/{reason}": float(count) for reason, count in self._sampled_tokens.items()},
        }
        if requests:
            values["engine_ms"] = max(one.prefill_ms + one.decode_ms for one in requests)
            values["held_ms"] = max(one.held_ms for one in requests)
        if requests and self._prompts.items is not None:
            values["tower_passes"] = max(one.tower_passes for one in requests)
            values["feature_mb"] = max(one.media_feature_bytes for one in requests) / 1e6
        if self._weight_update_handler is not None:
            values["aborts"] = self._weight_update_handler.aborts  # aborted groups since the loop began
        self._record("rollout", max(one.newest_version for one in played), values | self._admissions.media_figures())

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
