"""The rollout's loop: leave to enter → prompts → engine → rewards → complete groups on the bus.

It never waits for the trainer: it asks for admissions one step ahead, and the engine holds what must not start yet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from relax_core.contracts.bus import Admission, BusTimeout, GroupRow
from relax_core.contracts.data import BadRow, DataRow, PromptSource
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.tree import TRUNCATED, group_uid, sample_uid
from relax_core.engines.pool.engine_pool import EnginePool
from relax_core.engines.protocol.frames import StreamEnd
from relax_core.rollout.bad_rows import BadRows
from relax_core.rollout.episodes.episodes import EpisodePlayer, GroupStart, PlayedFigures, score_episodes
from relax_core.rollout.episodes.group_assembly import (
    DroppedGroup,
    GroupFilter,
    MakeExtras,
    complete_episodes,
    complete_group,
)
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.reward_inputs import reward_input
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.sample_seeds import sampling_seed
from relax_core.rollout.teacher_choice import TeacherOf
from relax_core.rollout.weight_update_handler import WeightUpdateHandler

Record = Callable[[str, int, Mapping[str, float]], None]
AGAIN_S = 1.0  # for the prompt that takes a bad row's place: its credit is back, so the bus answers at once
log = logging.getLogger(__name__)
MAX_TRUNCATED_IN_A_ROW = 64  # groups of which every response was cut, under rollout.mask_truncated


class RolloutBus(Protocol):
    """The bus as the rollout's event loop uses it."""

    async def admit_async(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]: ...

    async def put_async(self, rows: Sequence[GroupRow], *, timeout_s: float) -> None: ...

    async def drop_async(self, group_uid: str, *, reason: str, timeout_s: float) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    seed: int
    batch_prompts: int  # that are asked for together at most
    sampling: SamplingParams
    admit_timeout_s: float
    call_timeout_s: float
    worker: int = 0  # whose admissions these are
    alone: bool = True  # no other worker asks for admissions
    mask_off_policy: bool = False
    mask_truncated: bool = False
    in_order: bool = False  # groups are handed on in the order in which their responses came: the same one in every run


@dataclass(frozen=True, kw_only=True)
class PromptInHand:
    """An admitted prompt, ready for the engine. ``where``: its row's file and line. Of an env with turns the request
    has no tokens yet: its episodes open themselves."""

    index: int
    attempt: int
    row: DataRow
    where: str
    request: PromptRequest
    teacher: str | None


class Sampler:
    """One rollout worker's loop. ``gate(version)`` returns when nothing stands before prompts of that version (an
    evaluation, in the modes that promise the same bits). ``bad_rows`` books the rows that cannot be used.
    ``teacher_of``: of an algorithm with teachers. ``weight_update_handler``: where groups may end or begin anew with a
    weight version. ``advantages``: makes the advantages of a complete group, where no role does that. ``player``:
    plays the episodes of an env with turns."""

    def __init__(
        self,
        *,
        bus: RolloutBus,
        pool: EnginePool,
        source: PromptSource,
        prompts: PromptMaker,
        rewards: RewardPool,
        settings: SamplerSettings,
        record: Record,
        gate: Callable[[int], Any],
        bad_rows: BadRows,
        refuse: GroupFilter | None = None,
        teacher_of: TeacherOf | None = None,
        weight_update_handler: WeightUpdateHandler | None = None,
        advantages: MakeExtras | None = None,
        player: EpisodePlayer | None = None,
    ) -> None:
        self._bus = bus
        self._pool = pool
        self._source = source
        self._prompts = prompts
        self._rewards = rewards
        self._settings = settings
        self._record = record
        self._gate = gate
        self._bad_rows = bad_rows
        self._refuse = refuse
        self._teacher_of = teacher_of
        self._weight_update_handler = weight_update_handler
        self._advantages = advantages
        self._player = player
        self._newest_played: dict[int, asyncio.Task[PlayedFigures | None]] = {}  # by the weights that it waited for
        self._truncated_in_a_row = 0
        self._staged: list[GroupRow] = []
        self._flushing = False
        self._newest_group: asyncio.Task[float] | None = None  # whose responses came last

    async def run(self, reclaimed: Sequence[Admission]) -> None:
        """Runs until the bus closes (BusClosed) or a prompt batch fails (its error); no prompt batch is left behind."""
        prompt_batch = self._settings.batch_prompts
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._weight_update_handler is not None:
                    tasks.create_task(self._weight_update_handler.run())
                for start in range(0, len(reclaimed), prompt_batch):
                    await self._launch(reclaimed[start : start + prompt_batch], tasks)
                while True:
                    await self._launch(await self._admitted(prompt_batch), tasks)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # the first one ended the others

    async def _admitted(self, prompt_batch: int) -> list[Admission]:
        """Waits as long as the run goes on, however long the trainer is busy; the controller knows when it stands."""
        while True:
            try:
                return await self._bus.admit_async(
                    prompt_batch, worker=self._settings.worker, timeout_s=self._settings.admit_timeout_s
                )
            except BusTimeout as late:
                log.warning("waits on: %s", late)

    async def _launch(self, admissions: Sequence[Admission], tasks: asyncio.TaskGroup) -> None:
        """Starts a prompt batch for each weight version that these prompts wait for. Each waits at the gate by itself:
        a group that is admitted in the place of a dropped one may be what an evaluation in front of the others waits
        for."""
        by_version: dict[int, list[PromptInHand]] = defaultdict(list)
        for prompt in await self._usable(admissions):
            by_version[prompt.request.min_version].append(prompt)
        for version in sorted(by_version):
            prompt_batch = self._prompt_batch if self._player is None else self._played_prompt_batch
            tasks.create_task(prompt_batch(version, by_version[version], tasks))

    async def _usable(self, admissions: Sequence[Admission]) -> list[PromptInHand]:
        """The prompts of these admissions. A row that cannot be used ends its group with the reason, and the next row
        takes its place at once: so prompt batches of a worker that is alone are the same ones in every run with the
        same data and seed."""
        prompts: list[PromptInHand] = []
        while admissions:
            if self._weight_update_handler is not None:
                self._weight_update_handler.admitted(admissions)
            left_out = 0
            for admission in admissions:
                number = self._source.number(admission.index)
                self._bad_rows.meet(number)
                try:
                    prompts.append(self._in_hand(admission))
                except BadRow as error:
                    left_out += 1
                    await self._leave_out(admission.index, number, error)
            # Where others ask too, one of them may have the credit by now, and these prompts do not wait for another.
            admissions = await self._admitted_at_once(left_out) if left_out and self._settings.alone else ()
        return prompts

    async def _leave_out(self, index: int, number: int, error: BadRow) -> None:
        if self._weight_update_handler is not None:
            self._weight_update_handler.ended(index)
        await self._bus.drop_async(group_uid(index), reason=error.reason, timeout_s=self._settings.call_timeout_s)
        self._bad_rows.leave_out(number, error)

    async def _admitted_at_once(self, count: int) -> Sequence[Admission]:
        """None where the bus wants no more: a group that over-sampling has ended leaves no credit."""
        try:
            return await self._bus.admit_async(count, worker=self._settings.worker, timeout_s=AGAIN_S)
        except BusTimeout:
            return ()

    def _in_hand(self, admission: Admission) -> PromptInHand:
        row = self._source.row(admission.index)
        where = self._source.where(self._source.number(admission.index))
        return PromptInHand(
            index=admission.index,
            attempt=admission.attempt,
            row=row,
            where=where,
            request=PromptRequest(
                rid=f"{admission.group_uid}-{admission.attempt}",
                input_ids=[] if self._player is not None else self._prompts.tokens(row, where=where),
                sampling_seed=sampling_seed(self._settings.seed, index=admission.index),
                min_version=admission.min_version,
            ),
            teacher=None if self._teacher_of is None else self._teacher_of(row, where),
        )

    async def _prompt_batch(self, version: int, prompts: Sequence[PromptInHand], tasks: asyncio.TaskGroup) -> None:
        """One engine request for prompts that start at one weight version; groups leave as they complete."""
        await self._gate(version)
        start = time.perf_counter()
        if self._weight_update_handler is not None:  # some may be over since they were admitted
            prompts = [prompt for prompt in prompts if self._weight_update_handler.began(prompt.index, prompt.request)]
        samples = tokens = newest = 0
        engine: list[StreamEnd] = []
        groups: list[asyncio.Task[float]] = []
        async for place, responses in self._pool.generate(
            [prompt.request for prompt in prompts],
            self._settings.sampling,
            places=[prompt.index for prompt in prompts],
            on_end=engine.append,
        ):
            prompt = prompts[place]
            if self._weight_update_handler is not None:
                self._weight_update_handler.ended(prompt.index)
            samples += len(responses)
            tokens += sum(len(response.output_ids) for response in responses)
            newest = max(newest, int(responses[-1].versions[-1]))
            self._newest_group = tasks.create_task(self._score_and_stage(prompt, responses, tasks, self._newest_group))
            groups.append(self._newest_group)
        reward_s = sum(await asyncio.gather(*groups))
        if not samples:  # every group of it was given up
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
            values["aborts"] = self._weight_update_handler.aborts  # of groups, since the loop began
        self._record("rollout", newest, values)

    async def _played_prompt_batch(
        self, version: int, prompts: Sequence[PromptInHand], tasks: asyncio.TaskGroup
    ) -> None:
        """`_prompt_batch` for an env with turns: each group plays at its own pace and leaves when its episodes have
        ended."""
        await self._gate(version)
        start = time.perf_counter()
        groups = []
        # Nobody waits for a group that was handed on, and a run has many versions.
        self._newest_played = {of: group for of, group in self._newest_played.items() if not group.done()}
        for prompt in prompts:
            before = self._newest_played.get(version)
            group = tasks.create_task(self._play_and_stage(prompt, tasks, before))
            if self._weight_update_handler is not None and not self._weight_update_handler.began_episodes(
                prompt.index, group.cancel
            ):
                group.cancel()  # it was over before it began
                continue
            self._newest_played[version] = group
            groups.append(group)
        if not groups:
            return
        await asyncio.wait(groups)
        played = [one for group in groups if not group.cancelled() and (one := group.result()) is not None]
        if not played:
            return
        values = {
            "generate_ms": 1e3 * (time.perf_counter() - start),
            "reward_ms": 1e3 * sum(one.reward_s for one in played),
            "reward_failed": self._rewards.failures.share,
            "samples": sum(one.episodes for one in played),
            "turns": sum(one.turns for one in played) / sum(one.episodes for one in played),
            "tokens": sum(one.tokens for one in played),
        }
        if self._weight_update_handler is not None:
            values["aborts"] = self._weight_update_handler.aborts
        self._record("rollout", max(one.newest_version for one in played), values)

    async def _play_and_stage(
        self, prompt: PromptInHand, tasks: asyncio.TaskGroup, before: asyncio.Task[PlayedFigures | None] | None
    ) -> PlayedFigures | None:
        """A group's way from its opening to the bus. None where its opening cannot be used."""
        assert self._player is not None
        weight_update_handler = self._weight_update_handler
        start = GroupStart(
            index=prompt.index,
            attempt=prompt.attempt,
            row=prompt.row,
            where=prompt.where,
            rid=prompt.request.rid,
            min_version=prompt.request.min_version,
            asks=(lambda rid: None)
            if weight_update_handler is None
            else partial(weight_update_handler.asks, prompt.index),
            asked=(lambda rid: None)
            if weight_update_handler is None
            else partial(weight_update_handler.asked, prompt.index),
        )
        try:
            records = await self._player.play(start, tasks)
        except BadRow as error:
            await self._leave_out(prompt.index, self._source.number(prompt.index), error)
            return None
        if weight_update_handler is not None:
            weight_update_handler.ended(prompt.index)
        began = time.perf_counter()
        episodes = await score_episodes(records, self._rewards, row=prompt.row, where=prompt.where)
        reward_s = time.perf_counter() - began
        if self._settings.in_order and before is not None:
            await asyncio.wait([before])
        done = complete_episodes(
            index=prompt.index,
            episodes=episodes,
            refuse=self._refuse,
            teacher=prompt.teacher,
            mask_off_policy=self._settings.mask_off_policy,
            mask_truncated=self._settings.mask_truncated,
            extras=self._advantages,
        )
        await self._hand_on(done, tasks)
        return PlayedFigures.of(records, reward_s=reward_s)

    async def _score_and_stage(
        self,
        prompt: PromptInHand,
        responses: Sequence[Generated],
        tasks: asyncio.TaskGroup,
        before: asyncio.Task[float] | None,
    ) -> float:
        """A group's way from its responses to the bus, in a task of its own: no reward holds up another group or the
        engine. ``before``: the group whose responses came before these. Returns the seconds that the rewards took."""
        uid = group_uid(prompt.index)
        inputs = [
            reward_input(
                prompt.row,
                response,
                tokenizer=self._prompts.tokenizer,
                stop=self._settings.sampling.stop,
                uid=sample_uid(uid, response.sample),
                where=prompt.where,
            )
            for response in responses
        ]
        began = time.perf_counter()
        rewards = await self._rewards.score(inputs)
        reward_s = time.perf_counter() - began
        if self._settings.in_order and before is not None:
            await before
        done = complete_group(
            index=prompt.index,
            prompt_ids=prompt.request.input_ids,
            generated=responses,
            rewards=rewards,
            refuse=self._refuse,
            teacher=prompt.teacher,
            mask_off_policy=self._settings.mask_off_policy,
            mask_truncated=self._settings.mask_truncated,
            extras=self._advantages,
        )
        await self._hand_on(done, tasks)
        return reward_s

    async def _hand_on(self, done: GroupRow | DroppedGroup, tasks: asyncio.TaskGroup) -> None:
        self._count_truncated(done)
        if isinstance(done, DroppedGroup):
            await self._bus.drop_async(done.group_uid, reason=done.reason, timeout_s=self._settings.call_timeout_s)
            return
        self._staged.append(done)
        if not self._flushing:
            self._flushing = True
            tasks.create_task(self._flush())

    def _count_truncated(self, done: GroupRow | DroppedGroup) -> None:
        """Raises ValueError where nothing ends any more, and prompts would be sampled for ever."""
        truncated = isinstance(done, DroppedGroup) and done.reason == TRUNCATED
        self._truncated_in_a_row = self._truncated_in_a_row + 1 if truncated else 0
        if self._truncated_in_a_row >= MAX_TRUNCATED_IN_A_ROW:
            raise ValueError(
                f"rollout.mask_truncated=true: every response of {MAX_TRUNCATED_IN_A_ROW} groups in a row was cut at "
                f"rollout.max_new_tokens={self._settings.sampling.max_new_tokens}, so there is nothing to train on. "
                "Raise rollout.max_new_tokens, or use rollout.mask_truncated=false."
            )

    async def _flush(self) -> None:
        """Puts whatever is staged; what comes meanwhile goes with the next put, so a prompt batch costs one or two."""
        await asyncio.sleep(0)
        while self._staged:
            rows, self._staged = self._staged, []
            await self._bus.put_async(rows, timeout_s=self._settings.call_timeout_s)
        self._flushing = False
