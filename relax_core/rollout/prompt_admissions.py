"""Turns the bus's admissions into prompts that are ready for the engine, and leaves out data rows without a prompt."""

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
from relax_core.contracts.bus import Admission, BusTimeout
from relax_core.contracts.data import BadRow, DataRow, PromptSource
from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.contracts.media import BAD_MEDIA, MediaError
from relax_core.contracts.tree import group_uid
from relax_core.data.eval_sets import NAMED_ROWS, too_many_bad
from relax_core.rollout.episodes.episode_records import EpisodeRecord
from relax_core.rollout.partial_rollout import GroupsInFlight
from relax_core.rollout.prompt_tokens import Prompt, PromptMaker
from relax_core.rollout.sample_seeds import sampling_seed

TeacherOf = Callable[[DataRow, str], str]  # a data row and its name in errors → the teacher's name


def teacher_chooser(teachers: TeacherRequirements) -> TeacherOf:
    """Returns a function that gives the name of a data row's teacher.

    That is the only teacher if no column is set, and otherwise the column's value. The function raises `BadRow` for a
    row that names none of the teachers.
    """
    if not teachers.key:
        (only,) = teachers.models
        return lambda row, what: only
    return lambda row, what: named_teacher(row, teachers.key, known=teachers.models, what=what)


def named_teacher(row: DataRow, key: str, *, known: Collection[str], what: str) -> str:
    """Returns the teacher that the data row names; raises `BadRow` with the row, its value and the known teachers."""
    if key not in row:
        keys = ", ".join(sorted(row))
        text = f"{what}: no key {key!r}, which algo.teacher_key names; its keys are {keys}."
        raise BadRow.because("teacher", text)
    name = row[key]
    if not isinstance(name, str) or name not in known:
        raise BadRow.because(
            "teacher",
            f"{what}: {key}={name!r} is none of the teachers: {', '.join(known)}. Add algo.teachers.{name}=<a Hugging "
            "Face folder>, or correct the row.",
        )
    return name


class ModalityFigures:
    """Sums milliseconds by modality and figure, until `take` gives the means since it was called last."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._prompts: Counter[tuple[str, str]] = Counter()

    def add(self, modality: str, figure: str, milliseconds: float) -> None:
        """Adds the time of one prompt."""
        self._sums[modality, figure] += milliseconds
        self._prompts[modality, figure] += 1

    def take(self) -> dict[str, float]:
        """Returns each mean as "modality/video/encode_ms", with its number of prompts, and begins anew."""
        values: dict[str, float] = {}
        for (modality, figure), prompts in sorted(self._prompts.items()):
            values[f"modality/{modality}/{figure}_ms"] = self._sums[modality, figure] / prompts
            values[f"modality/{modality}/{figure}_prompts"] = prompts
        self._sums.clear()
        self._prompts.clear()
        return values


Report = Callable[[Sequence[Mapping[str, str]]], None]
log = logging.getLogger(__name__)


class BadRows:
    """Counts the drawn and the bad data rows of a rollout worker.

    ``rows`` is the number of data rows, and ``most`` the share of them that may be bad (data.max_bad_rows). ``report``
    is called with all named rows each time that one more is named. ``most_in_a_row`` is the number of rows in a row
    whose images or videos may be bad. ``media_reasons`` counts those that were, by reason.
    """

    def __init__(self, *, rows: int, most: float, report: Report, most_in_a_row: int = 64) -> None:
        self._rows = rows
        self._most = most
        self._report = report
        self._drawn: set[int] = set()
        self._bad: set[int] = set()
        self._named: list[dict[str, str]] = []
        self._most_in_a_row = most_in_a_row
        self._media_in_a_row: list[MediaError] = []
        self.media_reasons: Counter[str] = Counter()

    def draw(self, number: int) -> None:
        """Counts a data row that is drawn, usable or not."""
        if len(self._drawn) < self._rows:
            self._drawn.add(number)

    def use(self) -> None:
        """Says that the data row that was drawn last can be used."""
        self._media_in_a_row.clear()

    def leave_out(self, number: int, error: BadRow) -> None:
        """Counts a drawn data row that cannot be used; raises ValueError if there are too many of them."""
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
            first = "; ".join(one["text"] for one in self._named[:1])
            raise ValueError(
                f"{len(self._bad)} of the {len(self._drawn)} data rows that were drawn cannot be used, more than "
                f"data.max_bad_rows={self._most:g}. The first: {first} Correct the data, or raise data.max_bad_rows."
            )

    def _count_media(self, error: MediaError) -> None:
        """Counts a prompt with a bad item each time that it is drawn; raises ValueError if all in a row have one."""
        self.media_reasons[error.word] += 1
        self._media_in_a_row.append(error)
        if len(self._media_in_a_row) >= self._most_in_a_row:
            raise ValueError(
                f"the images or videos of {len(self._media_in_a_row)} data rows in a row cannot be used, "
                f"which is no chance. The first: "
                f"{self._media_in_a_row[0]} Is data.media_root mounted, and is it the folder of these paths?"
            )


AGAIN_S = 1.0  # the timeout for the prompt that replaces a bad data row; the bus has its credit and answers at once
log = logging.getLogger(__name__)


class AdmissionBus(Protocol):
    """Declares the calls of the bus that admissions need."""

    async def admit(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        """Waits until groups may be sampled and returns their admissions; raises BusTimeout."""

    async def drop(self, group_uid: str, *, reason: str, timeout_s: float) -> None:
        """Ends a group without training; the ledger keeps the reason."""

    async def name_modalities(self, modalities: Mapping[int, str], *, timeout_s: float) -> None:
        """Says which modality the prompts of these groups have, by index."""


@dataclass(frozen=True, kw_only=True)
class RolloutLoopSettings:
    """Holds the settings of a rollout loop.

    ``batch_prompts`` is the largest number of prompts in one engine request. ``worker`` is the rank of the rollout
    worker, and ``alone`` is True if no other worker asks for admissions. The run ends after ``max_failed_groups``
    groups in a row without one reward. With ``in_order``, groups go to the bus in the order in which their responses
    arrived, which is equal in every run. ``media_folder`` holds the files of encoded images and videos; it is empty for
    a run on text.
    """

    seed: int
    batch_prompts: int
    sampling: SamplingParams
    admit_timeout_s: float
    call_timeout_s: float
    max_failed_groups: int
    worker: int = 0
    alone: bool = True
    mask_off_policy: bool = False
    mask_truncated: bool = False
    in_order: bool = False
    media_folder: str = ""


@dataclass(frozen=True, kw_only=True)
class AdmittedPrompt:
    """Is an admitted prompt that is ready for the engine.

    ``number`` is the number of its data row, and ``where`` the row's file and line. ``modality`` is the prompt's. For
    an env of several turns the request has no tokens, because the env opens its own episodes; the names of theirs begin
    with its ``rid``. ``evaluation`` is empty for training; it names the evaluation set whose row ``index`` this is, so
    that its seeds and uids are its own.
    """

    index: int
    row: DataRow
    where: str
    request: PromptRequest
    attempt: int = 0
    number: int = 0
    modality: str = ""
    teacher: str | None = None
    evaluation: str = ""

    @property
    def uid(self) -> str:
        """Returns the uid of the group, which holds its media."""
        return f"{self.evaluation}/{self.index}" if self.evaluation else group_uid(self.index)

    def seed(self, of_run: int, purpose: str) -> int:
        """Returns the seed of the group for a purpose, such as "env"."""
        return sampling_seed(of_run, index=self.index, purpose=f"{self.evaluation}/{purpose}".removeprefix("/"))


class PromptAdmissions:
    """Asks the bus for admissions and makes their prompts; `RolloutLoop` explains the parameters.

    ``check_row`` raises `BadRow` for a data row (with its file and line) that its reward cannot score.
    ``makes_prompts`` is True for an env of several turns, whose requests have no tokens yet. ``go_on`` is True if the
    next admissions need not wait until the images and videos of earlier ones are encoded. They wait in a run whose
    batches must be equal every time, where each is admitted one train step ahead anyway.
    """

    def __init__(
        self,
        *,
        bus: AdmissionBus,
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
        self.figures = ModalityFigures()
        encodes = prompts.items is not None and not makes_prompts
        self.go_on = encodes and not (settings.in_order and settings.alone)

    async def next(self) -> list[Admission]:
        """Waits for admissions without a limit, because the trainer may be busy; the controller detects stalls."""
        settings = self._settings
        while True:
            try:
                return await self._bus.admit(
                    settings.batch_prompts, worker=settings.worker, timeout_s=settings.admit_timeout_s
                )
            except BusTimeout as late:
                log.warning("waits on: %s", late)

    def prompts(self, admissions: Sequence[Admission]) -> Coroutine[Any, Any, list[AdmittedPrompt]]:
        """Records these admissions at once, and returns the call that makes their prompts, of those that can be used.

        A data row that cannot be used ends its group with the reason. The next row replaces it at once, except with
        ``go_on``. Therefore the prompt batches of a run that must be repeatable are equal in every run with the same
        data and seed.
        """
        self._flight.admit(admissions)
        return self._make(admissions)

    def played(self, prompt: AdmittedPrompt, episodes: Sequence[EpisodeRecord]) -> None:
        """Counts a group whose episodes have ended; one of an env of several turns may have shown bad media.

        Raises ValueError if there are too many such rows.
        """
        if self._makes_prompts:
            bad = next((one.bad_media for one in episodes if one.bad_media is not None), None)
            if bad is None:
                self._bad_rows.use()
            else:
                self._bad_rows.leave_out(prompt.number, bad)
        elif prefill_ms := episodes[0].turns[0].response.prefill_ms:  # SGLang does not report it
            self.figures.add(prompt.modality, "prefill", prefill_ms)

    def media_figures(self) -> dict[str, float]:
        """Returns how many items were encoded and how many prompts had bad ones since the run began, by reason.

        The times by modality are those since the last call.
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
                names = {one.index: modality_of_row(row) for one, row in zip(admissions, rows, strict=True)}
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
            # If another call asks too, it may have taken the credit, and these prompts must not wait for it.
            replace = left_out > 0 and self._settings.alone and not self.go_on
            admissions = await self._admitted_at_once(left_out) if replace else ()
            self._flight.admit(admissions)
        return prompts

    async def leave_out(self, index: int, number: int, error: BadRow) -> None:
        """Ends the group of a data row that cannot be used; raises ValueError if there are too many such rows."""
        self._flight.end(index)
        self._prompts.release(group_uid(index))
        await self._bus.drop(group_uid(index), reason=error.reason, timeout_s=self._settings.call_timeout_s)
        self._bad_rows.leave_out(number, error)

    async def _admitted_at_once(self, count: int) -> Sequence[Admission]:
        """Returns no admission if the bus wants no more groups: a group that over-sampling ended leaves no credit."""
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
