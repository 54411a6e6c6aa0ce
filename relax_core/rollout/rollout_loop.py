"""Runs the loop of a rollout worker: admissions → prompts → episodes → rewards → complete groups on the bus.

The loop never waits for the trainer. It requests admissions one train step ahead, and the engine holds prompts back
until their weight version is loaded. `PromptAdmissions` makes the prompts of admissions and leaves out data rows that
cannot be used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from relax_core.config.modality import modality_of_row
from relax_core.contracts.algorithm import TeacherRequirements
from relax_core.contracts.bus import Admission, BusTimeout, Group
from relax_core.contracts.data import BadRow, DataRow, PromptSource
from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.contracts.media import BAD_MEDIA, MediaError
from relax_core.contracts.tree import TRUNCATED, group_uid
from relax_core.data.eval_sets import NAMED_ROWS, too_many_bad
from relax_core.engines.protocol.generate_messages import StreamEnd
from relax_core.observe.sample_log import SampleLog
from relax_core.rollout.dynamic_sampling import GroupFilter, TruncatedGroups
from relax_core.rollout.episodes.episode_records import (
    EpisodeRecord,
    GroupMetrics,
    played_values,
    score_episodes,
)
from relax_core.rollout.episodes.group_assembly import (
    DroppedGroup,
    MakeExtras,
    complete_group,
    report_lost,
    token_accounts,
)
from relax_core.rollout.episodes.group_player import GroupPlayer
from relax_core.rollout.episodes.shared_requests import start_in
from relax_core.rollout.partial_rollout import GroupsInFlight, WeightUpdateHandler
from relax_core.rollout.prompt_tokens import AdmittedPrompt, Prompt, PromptMaker, sampling_seed
from relax_core.rollout.rewards.reward_failures import FailedGroups
from relax_core.rollout.rewards.reward_pool import RewardPool

log = logging.getLogger(__name__)
AGAIN_S = 1.0  # timeout of the admission that replaces a bad data row; the bus has a free credit and answers at once
Record = Callable[[str, int, Mapping[str, float]], None]
Report = Callable[[Sequence[Mapping[str, str]]], None]
TeacherOf = Callable[[DataRow, str], str]  # a data row and its name in errors → the name of the teacher


class RolloutBus(Protocol):
    """Declares the calls of the bus that the rollout's event loop makes."""

    async def admit(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        """Waits until groups may be sampled and returns their admissions; raises BusTimeout."""

    async def drop(self, group_uid: str, *, reason: str, timeout_s: float) -> None:
        """Ends a group without training; the ledger stores the reason."""

    async def name_modalities(self, modalities: Mapping[int, str], *, timeout_s: float) -> None:
        """Reports the modality of the groups' prompts, by group index."""

    async def put(self, rows: Sequence[Group], *, timeout_s: float) -> None:
        """Puts complete groups into the bus."""


class RolloutLoop:
    """Runs the loop of one rollout worker.

    ``gate(version)`` returns when all evaluations that must precede prompts of this version are done. ``bad_rows``
    counts the data rows that cannot be used. ``teacher_of`` chooses the teacher of a data row, for algorithms with
    teachers. ``weight_update_handler`` is set if a new weight version may end or restart groups. ``advantages``
    computes the advantages of a complete group. It is None if a role computes them. ``player`` plays the episodes.
    ``samples`` logs the outcome of every group.
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
        self._cancelled: list[GroupMetrics] = []  # metrics of groups that were cancelled since the last record
        self._sampled_tokens: Counter[str] = Counter()  # by outcome
        self._truncated_groups = TruncatedGroups(settings.sampling.max_new_tokens)
        self._failed_groups = FailedGroups(settings.max_failed_groups)
        self._staged: list[Group] = []
        self._flushing = False
        self._newest_group: asyncio.Task[GroupMetrics] | None = None  # the group that ended last

    async def run(self, reclaimed: Sequence[Admission]) -> None:
        """Runs until the bus closes (raises BusClosed) or a prompt batch fails (raises its error); ends all batches."""
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
        """Makes prompts and starts their batches; with `PromptAdmissions.go_on`, concurrently with later admissions."""
        admitted = self._admissions.prompts(admissions)
        launched = self._launch(admitted, tasks)
        if self._admissions.go_on:
            start_in(tasks, launched, admitted)
        else:
            await launched

    async def _launch(self, admitted: Coroutine[Any, Any, Sequence[AdmittedPrompt]], tasks: asyncio.TaskGroup) -> None:
        """Starts one prompt batch per weight version of these prompts.

        Each batch waits at the gate separately. Otherwise there could be a deadlock: an evaluation holds batches back
        at the gate, and it may itself wait for a group that replaces a dropped group.
        """
        by_version: dict[int, list[AdmittedPrompt]] = defaultdict(list)
        for prompt in await admitted:
            by_version[prompt.request.min_version].append(prompt)
        for version in sorted(by_version):
            start_in(tasks, self._sample(version, by_version[version], tasks))

    async def _sample(self, version: int, prompts: Sequence[AdmittedPrompt], tasks: asyncio.TaskGroup) -> None:
        """Plays the groups of prompts of one weight version, and scores each group as soon as the group has ended."""
        await self._gate(version)
        start = time.perf_counter()
        requests: list[StreamEnd] = []
        groups: list[asyncio.Task[GroupMetrics]] = []
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
            self._record_metrics(played, requests, seconds=time.perf_counter() - start)

    async def _finish(
        self,
        prompt: AdmittedPrompt,
        episodes: Sequence[EpisodeRecord],
        tasks: asyncio.TaskGroup,
        before: asyncio.Task[GroupMetrics] | None,
    ) -> GroupMetrics:
        """Scores a group, makes its token tree, and puts the group into the bus.

        The method runs in a separate task per group. Therefore a slow reward does not delay other groups or the engine.
        ``before`` is the task of the previous group.
        """
        self._admissions.played(prompt, episodes)
        reward_s = await self._score(prompt, episodes)
        if self._settings.in_order and before is not None:
            await asyncio.wait([before])
        await self._hand_on(self._complete(prompt, episodes), tasks)
        return GroupMetrics.of(episodes, reward_s=reward_s)

    def _give_up(self, prompt: AdmittedPrompt, episodes: Sequence[EpisodeRecord]) -> None:
        """Counts the episodes and the untrained tokens of a cancelled group, and logs its samples."""
        self._prompts.release(prompt.uid)
        if episodes:
            self._sampled_tokens.update(token_accounts(episodes, None))
            if self._lost is not None:
                report_lost(self._lost, prompt.uid, episodes)
            self._cancelled.append(GroupMetrics.of(episodes, reward_s=0.0))

    def _record_metrics(self, played: Sequence[GroupMetrics], requests: Sequence[StreamEnd], *, seconds: float) -> None:
        """Records the metrics of a prompt batch, and of the groups that were cancelled since the last record."""
        played = [*played, *self._cancelled]
        self._cancelled = []
        values = {
            "generate_ms": 1e3 * seconds,
            "reward_ms": 1e3 * sum(played_figures.reward_s for played_figures in played),
            "reward_failed": self._rewards.failures.share,
            **played_values(played),
            **{f"tokens/{reason}": float(count) for reason, count in self._sampled_tokens.items()},
        }
        if requests:
            values["engine_ms"] = max(request.prefill_ms + request.decode_ms for request in requests)
            values["held_ms"] = max(request.held_ms for request in requests)
        if requests and self._prompts.items is not None:
            values["tower_passes"] = max(request.tower_passes for request in requests)
            values["feature_mb"] = max(request.media_feature_bytes for request in requests) / 1e6
        if self._weight_update_handler is not None:
            values["aborts"] = self._weight_update_handler.aborts  # groups that were aborted since the loop began
        self._record(
            "rollout",
            max(played_figures.newest_version for played_figures in played),
            values | self._admissions.media_metrics(),
        )

    async def _score(self, prompt: AdmittedPrompt, episodes: Sequence[EpisodeRecord]) -> float:
        """Scores the ended episodes of a group; returns the time of the rewards in seconds."""
        began = time.perf_counter()
        folder = self._settings.media_folder
        await score_episodes(episodes, self._rewards, row=prompt.row, where=prompt.where, media_folder=folder)
        reasons = [episode.output.reason if episode.reward is None else None for episode in episodes]
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
        """Puts all staged groups into the bus; a prompt batch needs one or two calls."""
        await asyncio.sleep(0)
        while self._staged:
            rows, self._staged = self._staged, []
            await self._bus.put(rows, timeout_s=self._settings.call_timeout_s)
            for row in rows:  # the bus now holds their images and videos
                self._prompts.release(row.group_uid)
        self._flushing = False


def teacher_chooser(teachers: TeacherRequirements) -> TeacherOf:
    """Returns a function that returns the name of a data row's teacher.

    Without algo.teacher_key, there is a single teacher for all rows. With this key, the row's value names the teacher,
    and the function raises `BadRow` for an unknown teacher.
    """
    if not teachers.key:
        (only,) = teachers.models
        return lambda row, what: only
    return lambda row, what: named_teacher(row, teachers.key, known=teachers.models, what=what)


def named_teacher(row: DataRow, key: str, *, known: Collection[str], what: str) -> str:
    """Returns the teacher that the data row names. Raises `BadRow` if the row names no known teacher."""
    if key not in row:
        keys = ", ".join(sorted(row))
        text = f"{what}: no key {key!r}, which algo.teacher_key names; its keys are {keys}."
        raise BadRow.because("teacher", text)
    name = row[key]
    if not isinstance(name, str) or name not in known:
        raise BadRow.because(
            "teacher",
            f"{what}: {key}={name!r} is not a teacher: {', '.join(known)}. Add algo.teachers.{name}=<a Hugging "
            "Face folder>, or correct the row.",
        )
    return name


class ModalityTimes:
    """Averages times in ms by modality and metric over all prompts since the last `take`."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._prompts: Counter[tuple[str, str]] = Counter()

    def add(self, modality: str, figure: str, milliseconds: float) -> None:
        """Adds the time of one prompt."""
        self._sums[modality, figure] += milliseconds
        self._prompts[modality, figure] += 1

    def take(self) -> dict[str, float]:
        """Returns the means, such as "modality/video/encode_ms", with their numbers of prompts, and resets all sums."""
        values: dict[str, float] = {}
        for (modality, figure), prompts in sorted(self._prompts.items()):
            values[f"modality/{modality}/{figure}_ms"] = self._sums[modality, figure] / prompts
            values[f"modality/{modality}/{figure}_prompts"] = prompts
        self._sums.clear()
        self._prompts.clear()
        return values


class BadRows:
    """Counts the drawn data rows of a rollout worker, and the bad rows among them.

    ``rows`` is the number of data rows. ``most`` is the share of rows that may be bad (data.max_bad_rows). The first
    `NAMED_ROWS` bad rows are reported by name: ``report`` is called with all named rows each time that a row is added.
    ``most_in_a_row`` is the limit of consecutive rows with bad images or videos. ``media_reasons`` counts prompts with
    bad images or videos, by reason.
    """

    def __init__(self, *, rows: int, most: float, report: Report, most_in_a_row: int = 64) -> None:
        self._rows = rows
        self._most = most
        self._report = report
        self._drawn: set[int] = set()
        self._bad: set[int] = set()
        self._named: list[dict[str, str]] = []
        self._max_in_a_row = most_in_a_row
        self._media_in_a_row: list[MediaError] = []
        self.media_reasons: Counter[str] = Counter()

    def draw(self, number: int) -> None:
        """Counts a drawn data row, usable or bad."""
        if len(self._drawn) < self._rows:
            self._drawn.add(number)

    def use(self) -> None:
        """Records that the newest drawn data row can be used."""
        self._media_in_a_row.clear()

    def leave_out(self, number: int, error: BadRow) -> None:
        """Counts a drawn data row that cannot be used; raises ValueError if too many rows are bad."""
        if isinstance(error, MediaError):
            self._count_media(error)
        if number in self._bad:
            return
        self._bad.add(number)
        if len(self._named) < NAMED_ROWS:
            self._named.append({"row": str(number), "reason": error.reason, "text": str(error)})
            log.warning("data row %d is left out (%s): %s", number, error.reason, error)
            self._report(list(self._named))
        if too_many_bad(len(self._bad), len(self._drawn), rows=self._rows, most=self._most):
            first = "; ".join(bad_row["text"] for bad_row in self._named[:1])
            raise ValueError(
                f"{len(self._bad)} of the {len(self._drawn)} data rows that were drawn cannot be used, more than "
                f"data.max_bad_rows={self._most:g}. The first: {first} Correct the data, or raise data.max_bad_rows."
            )

    def _count_media(self, error: MediaError) -> None:
        """Counts a prompt with a bad image or video; raises ValueError after too many consecutive bad prompts."""
        self.media_reasons[error.word] += 1
        self._media_in_a_row.append(error)
        if len(self._media_in_a_row) >= self._max_in_a_row:
            raise ValueError(
                f"the images or videos of {len(self._media_in_a_row)} data rows in a row cannot be used, "
                f"which suggests a common cause. The first: "
                f"{self._media_in_a_row[0]} Is data.media_root mounted, and is it the folder of these paths?"
            )


@dataclass(frozen=True, kw_only=True)
class RolloutLoopSettings:
    """Holds the settings of a rollout loop.

    ``batch_prompts`` is the largest number of prompts in one engine request. ``worker`` is the rank of the rollout
    worker. ``alone`` is True if the run has a single rollout worker. The run ends after ``max_failed_groups``
    consecutive groups without any reward; None means no limit. With ``in_order``, groups are put into the bus in the
    order in which their responses arrived, which is then equal in every run. ``media_folder`` stores the files of
    encoded images and videos. It is empty for a run with text only.
    """

    seed: int
    batch_prompts: int
    sampling: SamplingParams
    admit_timeout_s: float
    call_timeout_s: float
    max_failed_groups: int | None
    worker: int = 0
    alone: bool = True
    mask_off_policy: bool = False
    mask_truncated: bool = False
    in_order: bool = False
    media_folder: str = ""


class PromptAdmissions:
    """Requests admissions from the bus and makes their prompts; `RolloutLoop` explains the parameters.

    ``check_row`` raises `BadRow`, with file and line, for a data row that the row's reward cannot score.
    ``makes_prompts`` is True if the player makes the prompts (env of several turns); then requests have no tokens yet.
    ``go_on`` is True if the next admissions need not wait until the images and videos of earlier admissions are
    encoded. In a run with equal batches every time (``in_order``, one worker) the next admissions wait; the wait costs
    little, because admissions come one train step ahead.
    """

    def __init__(
        self,
        *,
        bus: RolloutBus,
        source: PromptSource,
        prompts: PromptMaker,
        settings: RolloutLoopSettings,
        bad_rows: BadRows,
        teacher_of: TeacherOf | None,
        check_row: Callable[[DataRow, str], None],
        flight: GroupsInFlight,
        makes_prompts: bool,
    ) -> None:
        self._bus = bus
        self._source = source
        self._prompts = prompts
        self._settings = settings
        self._bad_rows = bad_rows
        self._teacher_of = teacher_of
        self._check_row = check_row
        self._flight = flight
        self._makes_prompts = makes_prompts
        self.figures = ModalityTimes()
        encodes = prompts.items is not None and not makes_prompts
        self.go_on = encodes and not (settings.in_order and settings.alone)

    async def next(self) -> list[Admission]:
        """Waits for admissions without a time limit, because the trainer may be busy; the controller detects stalls."""
        settings = self._settings
        while True:
            try:
                return await self._bus.admit(
                    settings.batch_prompts, worker=settings.worker, timeout_s=settings.admit_timeout_s
                )
            except BusTimeout as late:
                log.warning("waits on: %s", late)

    def prompts(self, admissions: Sequence[Admission]) -> Coroutine[Any, Any, list[AdmittedPrompt]]:
        """Records these admissions at once; returns a coroutine that makes the prompts of their usable data rows.

        A group with a data row that cannot be used is dropped with a reason. Without ``go_on``, the next data row
        replaces it at once. Therefore the prompt batches of a repeatable run are equal in every run with the same data
        and seed.
        """
        self._flight.admit(admissions)
        return self._make(admissions)

    def played(self, prompt: AdmittedPrompt, episodes: Sequence[EpisodeRecord]) -> None:
        """Counts a group after its episodes have ended; an env of several turns may have shown bad images or videos.

        Raises ValueError if too many rows are bad.
        """
        if self._makes_prompts:
            bad = next((episode.bad_media for episode in episodes if episode.bad_media is not None), None)
            if bad is None:
                self._bad_rows.use()
            else:
                self._bad_rows.leave_out(prompt.number, bad)
        elif prefill_ms := episodes[0].turns[0].response.prefill_ms:  # SGLang does not report this time
            self.figures.add(prompt.modality, "prefill", prefill_ms)

    def used(self) -> None:
        """Records that the newest drawn data row could be used, if the caller and not this object makes the prompts."""
        self._bad_rows.use()

    def media_metrics(self) -> dict[str, float]:
        """Returns metrics of images and videos: the encoded items, and the prompts with bad items by reason.

        The counts cover the whole run. The times by modality cover the time since the last call.
        """
        if self._prompts.items is None:
            return {}
        reasons = self._bad_rows.media_reasons
        by_reason = {f"{BAD_MEDIA}/{word}": float(count) for word, count in reasons.items()}
        counts = {"encoded": self._prompts.items.encoded, BAD_MEDIA: reasons.total(), **by_reason}
        return counts | self.figures.take()

    async def _make(self, admissions: Sequence[Admission]) -> list[AdmittedPrompt]:
        prompts: list[AdmittedPrompt] = []
        while admissions:
            left_out = 0
            numbers = [self._source.number(admission.data_index) for admission in admissions]
            rows = [self._row_or_error(number) for number in numbers]
            if self._prompts.items is not None:
                names = {admission.index: modality_of_row(row) for admission, row in zip(admissions, rows, strict=True)}
                await self._bus.name_modalities(names, timeout_s=self._settings.call_timeout_s)
            # The images and videos of all these prompts are encoded at the same time.
            made = await asyncio.gather(*map(self._prompt_or_error, admissions, numbers, rows))
            for admission, number, prompt in zip(admissions, numbers, made, strict=True):
                self._bad_rows.draw(number)
                if isinstance(prompt, AdmittedPrompt):
                    if not self._makes_prompts:  # an env of several turns may still show bad images
                        self._bad_rows.use()
                    prompts.append(prompt)
                else:
                    left_out += 1
                    await self.leave_out(admission.index, number, prompt)
            # With `go_on`, a concurrent call may have used the credit, and these prompts must not wait.
            replace = left_out > 0 and self._settings.alone and not self.go_on
            admissions = await self._admit_without_waiting(left_out) if replace else ()
            self._flight.admit(admissions)
        return prompts

    async def leave_out(self, index: int, number: int, error: BadRow) -> None:
        """Drops the group of a data row that cannot be used; raises ValueError if too many rows are bad."""
        self._flight.end(index)
        self._prompts.release(group_uid(index))
        await self._bus.drop(group_uid(index), reason=error.reason, timeout_s=self._settings.call_timeout_s)
        self._bad_rows.leave_out(number, error)

    async def _admit_without_waiting(self, count: int) -> Sequence[Admission]:
        """Returns up to ``count`` admissions; none without a credit, for example if over-sampling ended the groups."""
        try:
            return await self._bus.admit(count, worker=self._settings.worker, timeout_s=AGAIN_S)
        except BusTimeout:
            return ()

    def _row_or_error(self, number: int) -> DataRow | BadRow:
        try:
            return self._source.numbered(number)
        except BadRow as error:
            return error

    async def _prompt_or_error(
        self, admission: Admission, number: int, row: DataRow | BadRow
    ) -> AdmittedPrompt | BadRow:
        try:
            return row if isinstance(row, BadRow) else await self._prompt(admission, number, row)
        except BadRow as error:
            return error

    async def _prompt(self, admission: Admission, number: int, row: DataRow) -> AdmittedPrompt:
        where, modality = self._source.where(number), modality_of_row(row)
        self._check_row(row, where)
        teacher = None if self._teacher_of is None else self._teacher_of(row, where)
        prompt = Prompt(token_ids=[])
        if not self._makes_prompts:
            start = time.perf_counter()
            prompt = await self._prompts.prompt(row, where=where, owner=admission.group_uid)
            if prompt.media:
                self.figures.add(modality, "encode", 1e3 * (time.perf_counter() - start))
        return AdmittedPrompt(
            index=admission.index,
            number=number,
            attempt=admission.attempt,
            row=row,
            where=where,
            modality=modality,
            request=PromptRequest(
                rid=f"{admission.group_uid}-{admission.attempt}",
                input_ids=prompt.token_ids,
                sampling_seed=sampling_seed(self._settings.seed, index=admission.index),
                min_version=admission.min_version,
                media=prompt.media,
            ),
            teacher=teacher,
        )
