"""Checks the data before a run starts: unusable rows, prompt lengths, media, labels, and the steps of the epochs."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.config.choices import TEXT, LauncherKind, MediaPlace, Overlong
from relax_core.config.engine_checks import offline_rows
from relax_core.config.modality import MODELS_THAT, media_kinds
from relax_core.config.reward_choice import RewardChoice, row_check
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.algorithm import Offline
from relax_core.contracts.data import TOO_LONG, BadRow, DataRow, EvalSet, PromptSource
from relax_core.contracts.media import BAD_MEDIA, MEDIA_KINDS, MediaKind, MediaSource
from relax_core.contracts.reward import AUTO
from relax_core.data.chat_template import TEMPLATE_FILES
from relax_core.data.eval_sets import NAMED_ROWS, eval_sets, held_out_count, too_many_bad
from relax_core.data.generated import LONGEST_PROMPT, example
from relax_core.data.paths import data_files, data_parts
from relax_core.data.plugin_source import names_plugin
from relax_core.data.row_formats import MessagesOfText
from relax_core.data.row_media import MediaColumns, unread_media
from relax_core.data.sources import are_rows_named, file_rows, make_source
from relax_core.families.hf_config import CONFIG_FILE
from relax_core.plan.offline_check import look_at_rows
from relax_core.plan.prompt_maker import ItemHeaders, positions, prompt_maker, prompt_room
from relax_core.plan.reward_check import RewardCheck, check_reward
from relax_core.registry import find_algorithm, find_env, find_reward, is_file_plugin
from relax_core.rollout.evaluator import PreparedSet, eval_where, prepare
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.label_check import LabelCheck
from relax_core.rollout.rollout_loop import TeacherOf, teacher_chooser

if TYPE_CHECKING:
    from relax_core.data.media.media_headers import PlannedItem


def settle_steps(config: RelaxConfig) -> RelaxConfig:
    """If ``run.epochs`` is set, derives ``run.steps`` from it; returns the configuration.

    Problems with the data are reported by the data check. A job on another cluster derives the steps on that cluster,
    which has the files.
    """
    epochs, prompts = config.run.epochs, config.rollout.prompts_per_step
    if epochs is None or not 0 < epochs < math.inf or prompts < 1 or config.launcher.name is LauncherKind.ray_job:
        return config
    rows = _training_rows(config)
    if rows is None:
        return config
    steps = max(1, math.ceil(round(epochs * rows / prompts, 6)))
    return dataclasses.replace(config, run=dataclasses.replace(config.run, steps=steps))


def epoch_notes(config: RelaxConfig) -> list[str]:
    """Returns a sentence with the computation of ``run.steps`` from ``run.epochs``, for a settled configuration."""
    if config.run.epochs is None:
        return []
    rows, prompts = _training_rows(config), config.rollout.prompts_per_step
    return [f"run.epochs={config.run.epochs:g} over {rows} rows, {prompts} a step, is run.steps={config.run.steps}."]


def _training_rows(config: RelaxConfig) -> int | None:
    """Returns the number of training rows, or None if the data cannot be read."""
    data = config.data
    if data.task is not None:
        return data.size
    if not are_rows_named(data):
        return None
    try:
        return file_rows(data, offline=offline_rows(config))[1]
    except (ValueError, OSError):
        return None


FIRST_ROWS = 256  # number of data rows to count media in


class UnreadMedia:
    """Finds rows with media that no key of `data.media_keys` names; training would ignore these media.

    A row is reported if it has a column with media. If the model does not read this kind of media, or the env makes
    prompts from the row, the row is reported only if its prompt also has a placeholder. Rows with a placeholder and
    without a media column are reported if their share exceeds data.max_bad_rows; otherwise they are left out as bad
    rows. If a key names another column, a column without a placeholder only gets a note, because the user then chose
    the model's media. With modality=text no row is reported.
    """

    def __init__(self, config: RelaxConfig) -> None:
        self._kinds, self._data = media_kinds(config), config.data
        self._columns = MediaColumns(columns=config.data.media_keys.columns)
        env = find_env(config.env.name)
        self._makes_prompts = env.has_turns or env.agent is not None
        self._looks = config.modality.name != TEXT and config.data.task is None
        # by kind, and whether the media are in a column
        self._first: dict[tuple[MediaKind, bool], tuple[str, str | None, bool]] = {}
        self._places = dict.fromkeys(MEDIA_KINDS, 0)  # number of rows with a placeholder and without a column
        self._noted: dict[MediaKind, tuple[str, str]] = {}
        self._looked = 0

    def look(self, row: DataRow, where: str, given: Callable[[], set[MediaKind]] = set) -> None:
        """Checks a data row. ``given`` returns the kinds of media in the row's prompt."""
        self._looked += 1
        found = unread_media(row, self._columns) if self._looks else {}
        for kind, (column, has_place) in found.items():
            asks = kind in self._kinds and not self._makes_prompts
            if (has_place or asks) and (column or asks) and kind not in given():
                if column and not has_place and self._columns.columns:
                    self._noted.setdefault(kind, (where, column))
                    continue
                self._first.setdefault((kind, column is not None), (where, column, has_place))
                self._places[kind] += column is None

    def notes(self) -> Iterator[str]:
        """Yields a note for each unused column with media that the model could read.

        Such a column has neither a key nor a placeholder.
        """
        for kind, (where, column) in self._noted.items():
            first = "" if self._data.media_place else f" data.media_place={MediaPlace.first.value}"
            yield (
                f"{where}: column {column} has media of kind {kind}, and data.media_keys.{kind} is not set, so the "
                f"model does not get it. To train on it add data.media_keys.{kind}={column}{first}."
            )

    def refused(self, *, rows: int) -> str | None:
        """Returns the reason why a run on ``rows`` rows like these cannot start, or None if no row is reported."""
        most = self._data.max_bad_rows
        for (kind, in_column), (where, column, has_place) in self._first.items():
            if not in_column and not too_many_bad(self._places[kind], self._looked, rows=rows, most=most):
                continue
            has = f"{where}: it has media of kind {kind} in column {column}"
            if not in_column:
                has = f"{where}: its prompt has a place <{kind}>, and no column with media of this kind is found"
            if kind not in self._kinds:
                fix = f"Choose a model that {MODELS_THAT[kind]}; or modality={TEXT}, which trains on the text alone."
                return f"{has}, which the model does not read. {fix}"
            words = [f"data.media_keys.{kind}={column or 'COLUMN'}"]
            if not has_place and self._data.media_place is None:
                words.append(f"data.media_place={MediaPlace.first.value}")
            return (
                f"{has}, and data.media_keys.{kind} is not set, so the model would not get it. Add {' '.join(words)}; "
                f"or modality={TEXT}, which trains on the text alone."
            )
        return None


@dataclass(frozen=True, kw_only=True)
class PromptMedia:
    """Describes the media of the first ``prompts`` rows that can be used.

    ``items``, ``rows`` of the language model, ``patches`` of the vision tower, ``audio_frames`` of the audio tower and
    ``nbytes`` of tensors are means over these prompts. ``most_rows``, ``most_patches``, ``most_audio_frames`` and
    ``most_bytes`` are the maxima over these prompts. ``item_patches`` are the patches of the largest item.
    ``source_pixels`` is the largest size of an image or a frame before it is resized. ``videos`` and ``sounds`` are
    True if the prompts have any: videos need the tokenizer, and sounds need more memory. ``prompts`` is 0 if there are
    no rows yet; the numbers are then the maxima that the limits allow.
    """

    prompts: int
    items: float
    rows: float
    patches: float
    nbytes: float
    most_rows: int
    most_patches: int
    most_bytes: int
    item_patches: int
    source_pixels: int
    videos: bool
    sounds: bool = False
    audio_frames: float = 0.0
    most_audio_frames: int = 0


def summarize_media(prompts: Sequence[Sequence[PlannedItem]]) -> PromptMedia | None:
    """Returns the description of the prompts' media, or None without prompts."""
    if not prompts:
        return None
    items = [item for prompt in prompts for item in prompt]
    return PromptMedia(
        prompts=len(prompts),
        items=len(items) / len(prompts),
        rows=sum(item.rows for item in items) / len(prompts),
        patches=sum(item.patches for item in items) / len(prompts),
        nbytes=sum(item.nbytes for item in items) / len(prompts),
        most_rows=max(sum(item.rows for item in prompt) for prompt in prompts),
        most_patches=max(sum(item.patches for item in prompt) for prompt in prompts),
        most_bytes=max(sum(item.nbytes for item in prompt) for prompt in prompts),
        item_patches=max((item.patches for item in items), default=0),
        source_pixels=max((item.source_pixels for item in items), default=0),
        videos=any(item.kind == "video" for item in items),
        sounds=any(item.audio_frames for item in items),
        audio_frames=sum(item.audio_frames for item in items) / len(prompts),
        most_audio_frames=max(sum(item.audio_frames for item in prompt) for prompt in prompts),
    )


MAX_LISTED_ROWS = 100_000  # data with at most this many rows is checked completely
TOKENIZED_BYTES = 4 << 20
GENERATED_ROWS = 64  # checked rows of a generated task; all its rows are alike
SETTLED_S = 0.1  # seconds since the last write after which a change of the file gets another modification time


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """Holds the result of a data check.

    ``rows`` is the number of trained rows. ``generated`` is True if a task generates the rows, so a few rows represent
    all. ``looked`` is the number of checked rows, spread over the files. ``bad`` maps a reason to the number of bad
    rows among the checked rows, and ``named`` describes the first bad rows. ``longest`` is the number of tokens of the
    longest tokenized prompt, evaluation sets included. ``bound`` is an upper bound for the tokens of all checked
    prompts, and of all prompts of a generated task. Both are 0 without a tokenizer. ``cut`` is the number of prompts
    that data.overlong shortens. ``media`` describes the media of the first prompts; it is None for a run on text.
    ``notes`` are about labels, unread media, prompts of JSON text, and evaluation rows that are also trained on.
    ``refused`` is the reason why the run cannot start.
    """

    rows: int
    generated: bool
    looked: int
    bad: Counter[str]
    named: Sequence[str]
    longest: int
    bound: int
    cut: int
    sets: Sequence[PreparedSet]
    media: PromptMedia | None
    notes: Sequence[str]
    refused: str | None

    def describe(self, *, what: str) -> list[str]:
        """Returns sentences about the data for the user. ``what`` is the data's name."""
        if self.generated:
            part = "generated"
        else:
            part = "all checked" if self.looked == self.rows else f"{self.looked:,} of them checked, spread evenly"
        lengths = f"; no prompt has more than {self.bound} tokens" if self.bound else ""
        lines = [f"{self.rows:,} rows of {what} are trained on, {part}{lengths}.", *self.left_out()]
        if any(eval_set.name for eval_set in self.sets):
            rows = ", ".join(f"{eval_set.name} {len(eval_set.rows)}" for eval_set in self.sets)
            lines.append(f"Evaluation sets, by prompts: {rows}.")
        return lines

    def left_out(self) -> list[str]:
        """Returns sentences about shortened prompts and unused rows, and the notes."""
        lines = []
        if self.cut:
            lines.append(f"{self.cut:,} prompts are too long for the context, and are shortened.")
        if self.bad:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.bad.most_common())
            lines.append(f"{self.bad.total():,} rows cannot be used and are left out ({reasons}). The first of them:")
            lines += [f"  {text}" for text in self.named]
        for eval_set in self.sets:
            if eval_set.bad:
                name = f"evaluation set {eval_set.name}" if eval_set.name else "the held-out rows"
                lines.append(
                    f"{len(eval_set.bad)} of {name} cannot be used and are left out. The first: {eval_set.bad[0]}"
                )
        return [*lines, *self.notes]


_newest: dict[str, DataSummary] = {}  # the newest result of this process


def summarize_data(config: RelaxConfig) -> DataSummary:
    """Reads rows, and makes their prompts if a tokenizer is available.

    Raises ValueError (key, value, fix) if the data cannot be used. A second call in the same process reuses the result
    if the files are unchanged.
    """
    key = _key(config)
    if key is None or key not in _newest:
        look = _look(config)
        _newest.clear()
        if key is None:
            return look
        _newest[key] = look
    return _newest[key]


def reuse_summary(config: RelaxConfig, settled: RelaxConfig) -> None:
    """Makes the result for ``config`` the result for ``settled``, the same configuration with the derived context."""
    key, settled_key = _key(config), _key(settled)
    if key is not None and settled_key is not None and key in _newest:
        _newest[settled_key] = _newest[key]


def _look_offline(config: RelaxConfig, kind: Offline) -> DataSummary:
    """Returns the result of a data check for rows that are trained without engines."""
    source = make_source(config.data, seed=config.seed, eval_rows=held_out_count(config), offline=kind)
    generated = config.data.task is not None
    step = max(1, len(source) // GENERATED_ROWS if generated else -(-len(source) // MAX_LISTED_ROWS))
    look = look_at_rows(config, source, kind=kind, step=step)
    most, bad, refused = config.data.max_bad_rows, look.bad.total(), None
    if too_many_bad(bad, look.looked, rows=look.looked if generated else len(source), most=most):
        refused = (
            f"{bad:,} of the {look.looked:,} checked rows cannot be used, more than "
            f"data.max_bad_rows={most:g}. The first: {look.named()[0]}"
        )
    if kind != "demonstrations" and look.most_rows > config.parallel.micro_batch_tokens:
        refused = refused or (
            f"parallel.micro_batch_tokens={config.parallel.micro_batch_tokens}: the largest pair has {look.most_rows} "
            f"token rows, and a pair is never split. Use {look.most_rows} or more."
        )
    if config.eval.every and look.media:
        refused = refused or (
            f"eval.every={config.eval.every} with algo={config.algo.name} and rows with images, videos or sounds: "
            "held-out rows with media are not evaluated yet. Use eval.every=0."
        )
    if config.eval.every and refused is None:
        eval_sets(config, source, offline=kind)  # raises for sets that cannot be used
    return DataSummary(
        rows=len(source),
        generated=generated,
        looked=look.looked,
        bad=look.bad,
        named=look.named(),
        longest=look.longest,
        bound=max(look.longest, look.rest),
        cut=0,
        sets=[],
        media=None,
        notes=[],
        refused=refused,
    )


def _look(config: RelaxConfig) -> DataSummary:
    if (kind := offline_rows(config)) is not None:
        return _look_offline(config, kind)
    source = make_source(config.data, seed=config.seed, eval_rows=held_out_count(config))
    headers = ItemHeaders(config)
    try:
        prompts = prompt_maker(config, headers=headers)
    except ValueError:  # settle_context reports it
        prompts = None
    teachers = find_algorithm(config.algo.name).requirements(config.algo).teacher
    generated, most = config.data.task is not None, config.data.max_bad_rows
    teacher_of = None if teachers is None or not teachers.key or generated else teacher_chooser(teachers)
    rewards = row_check(find_reward(config.reward.name), config.reward)
    found = _Found(source, prompts, teacher_of, rewards, headers, UnreadMedia(config), room=prompt_room(config))
    numbers = range(min(GENERATED_ROWS, len(source))) if generated else range(len(source))
    for number in numbers[:: max(1, -(-len(numbers) // MAX_LISTED_ROWS))]:
        found.read(number)
    if prompts is not None:
        found.tokenize(prompts)
    # A few rows of a generated task represent all rows.
    rows = found.looked if generated else len(source)
    refused = _refused(config, found, rows=rows)
    sets = eval_sets(config, source) if config.eval.every and refused is None and prompts is not None else []
    refused = refused or _unread_in_sets(config, sets)
    reward = RewardCheck() if refused else check_reward(config, source)
    refused = refused or reward.refused
    asked = [] if prompts is None or refused else [prepare(eval_set, prompts, max_bad=most) for eval_set in sets]
    longest = max([found.longest, *(len(row.input_ids) for eval_set in asked for row in eval_set.rows)])
    spare = _spare(config) if generated else 0
    return DataSummary(
        rows=len(source),
        generated=generated,
        looked=found.looked,
        bad=found.bad,
        named=found.named(),
        longest=longest,
        bound=max(longest, found.longest + spare, found.rest) if longest else 0,
        cut=found.cut,
        sets=asked,
        media=summarize_media(found.media) if media_kinds(config) else None,
        notes=[] if refused else [*reward.notes, *found.notes(sets), *found.trained_notes(sets)],
        refused=refused,
    )


def _unread_in_sets(config: RelaxConfig, sets: Sequence[EvalSet]) -> str | None:
    unread = UnreadMedia(config)
    for eval_set in sets:
        for number, row in enumerate(eval_set.rows):
            unread.look(row, eval_where(eval_set.name, number))
    return unread.refused(rows=sum(len(eval_set.rows) for eval_set in sets))


def _spare(config: RelaxConfig) -> int:
    """Returns how many more characters an unchecked row of a generated task may have than the checked rows."""
    task = config.data.task
    assert task is not None
    rows = range(min(GENERATED_ROWS, config.data.size))
    looked = max(len(example(task, split="train", seed=config.seed, index=row).prompt) for row in rows)
    return LONGEST_PROMPT[task] - looked


def _refused(config: RelaxConfig, found: _Found, *, rows: int) -> str | None:
    remedy = _remedy(config, found)
    if (unread := found.unread.refused(rows=rows)) is not None:
        return unread
    if found.too_long and config.data.overlong is Overlong.error:
        named = ", ".join(f"{where} has {tokens}" for where, tokens in found.too_long_in_order()[:NAMED_ROWS])
        return (
            f"{len(found.too_long)} of the {found.looked:,} checked prompts are longer than the "
            f"{max(prompt_room(config), 0)} tokens that remain after "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}: {named}. {remedy}"
        )
    for kind, column in config.data.media_keys.columns.items():
        if found.columns and column not in found.columns:
            has = ", ".join(sorted(found.columns))
            return (
                f"data.media_keys.{kind}={column}: no checked row has this column. Use one of these: {has}; "
                "or drop the key."
            )
    if config.reward.shadow not in (AUTO, None) and found.without_shadow and not found.with_shadow:
        return (
            f"reward.shadow={config.reward.shadow}: it can judge none of the checked rows. The first: "
            f"{found.without_shadow} Name another shadow reward, or null."
        )
    most = config.data.max_bad_rows
    if not too_many_bad(found.bad.total(), found.looked, rows=rows, most=most):
        return None
    return (
        f"{found.bad.total():,} of the {found.looked:,} checked rows cannot be used, more than "
        f"data.max_bad_rows={most:g}. The first: {found.named()[0]} {remedy}"
    ).rstrip()


def _remedy(config: RelaxConfig, found: _Found) -> str:
    """Returns the fix that makes most of the bad rows usable, or "" without a general fix."""
    if not found.too_long:
        missing = found.bad[f"{BAD_MEDIA}:missing_file"]
        return "Are the files mounted? Name their folder in data.media_root." if missing else ""
    most, limit = found.longest + config.rollout.max_new_tokens, positions(config)
    if config.engine.context_length is not None and (limit is None or most <= limit):
        return f"Use engine.context_length={most}, or null, which derives it; or data.overlong=truncate_middle."
    known = "" if limit is None else f" The model has {limit} positions."
    return f"Lower rollout.max_new_tokens, or use data.overlong=truncate_middle.{known}"


class _Found:
    """Collects the findings of a data check.

    ``too_long`` maps the number of each prompt that is too long to its count of tokens. ``longest`` is the number of
    tokens of the longest tokenized prompt. ``rest`` is the size in bytes of the longest prompt that was not tokenized,
    if that prompt may have more tokens. ``with_shadow`` counts rows with a label that the shadow reward can judge.
    ``without_shadow`` is the shadow reward's error for the first other row.
    """

    def __init__(
        self,
        source: PromptSource,
        prompts: PromptMaker | None,
        teacher_of: TeacherOf | None,
        rewards: RewardChoice | None,
        headers: ItemHeaders,
        unread: UnreadMedia,
        *,
        room: int,
    ) -> None:
        self.looked = self.cut = self.longest = self.rest = self.with_shadow = 0
        self.without_shadow = ""
        self.bad: Counter[str] = Counter()
        self.too_long: dict[int, int] = {}
        self._source, self._prompts, self._teacher_of, self._room = source, prompts, teacher_of, room
        self.columns: set[str] = set()  # columns of the readable rows
        self.media: list[list[PlannedItem]] = []  # media of the first prompts
        self._headers, self._rewards, self.unread = headers, rewards, unread
        self._labels = None if rewards is None else LabelCheck(rewards)  # None if the reward can score any label
        self._json_prompts = 0
        self._trained: set[int] = set()  # hashes of rows
        self._texts: dict[int, str] = {}
        self._sizes: list[tuple[int, int]] = []  # (negative bytes of a prompt, number); the longest prompt is first

    def read(self, number: int) -> None:
        self.looked += 1
        try:
            row, where = self._source.numbered(number), self._source.where(number)
            self.columns.update(row)
            self.unread.look(row, where, lambda: self._given(row, where))
            if self._rewards is not None:
                self._rewards.check_row(row, where)
            if self._labels is not None:
                self._labels.add(row, where)
            self._check_shadow(row, where)
            self._json_prompts += isinstance(row["prompt"], MessagesOfText)
            self._trained.add(_row_hash(row))
            if self._teacher_of is not None:
                self._teacher_of(row, where)
            if self._prompts is not None:
                self._sizes.append((-self._prompts.bound(row, where=where), number))
                if len(self.media) < FIRST_ROWS:
                    items = map(self._headers.item, self._prompts.sources(row, where=where))
                    self.media.append([item for item in items if item is not None])
        except BadRow as error:
            self._leave_out(number, error)

    def _check_shadow(self, row: DataRow, where: str) -> None:
        """Counts rows with a label that the shadow reward can judge, and keeps the error of the first other row."""
        shadow = None if self._rewards is None else self._rewards.shadow
        if shadow is None or shadow.spec.check_row is None:
            self.with_shadow += 1
            return
        try:
            shadow.spec.check_row(row, shadow.config)
            self.with_shadow += 1
        except ValueError as error:
            self.without_shadow = self.without_shadow or f"{where}: {error}"

    def _given(self, row: DataRow, where: str) -> set[MediaKind]:
        """Returns the kinds of media in a row's prompt."""
        return set() if self._prompts is None else {source.kind for source in self._prompts.sources(row, where=where)}

    def tokenize(self, prompts: PromptMaker) -> None:
        """Tokenizes the longest texts first.

        Stops when no remaining text can have more tokens than the longest prompt so far or than a prompt may have. Also
        stops when the limit of text is reached.
        """
        left = TOKENIZED_BYTES
        for size, number in sorted(self._sizes):
            size = -size
            if size <= self.longest and size <= self._room:
                return
            if size > left and self.longest:
                self.rest = size
                return
            left -= size
            self._measure(number, prompts)

    def _measure(self, number: int, prompts: PromptMaker) -> None:
        row, where = self._source.numbered(number), self._source.where(number)
        tokens = prompts.count(row, where=where)
        self.longest = max(self.longest, tokens)
        if tokens <= self._room:
            return
        self.too_long[number] = tokens
        try:
            prompts.tokens(row, where=where)
            self.cut += 1
        except BadRow as error:
            self._leave_out(number, error)
        except ValueError as error:  # only with data.overlong=error
            self._leave_out(number, BadRow(TOO_LONG, str(error)))

    def _leave_out(self, number: int, error: BadRow) -> None:
        self.bad[error.reason] += 1
        self._texts[number] = f"row {number}: {error}"

    def named(self) -> list[str]:
        return [text for _, text in sorted(self._texts.items())[:NAMED_ROWS]]

    def notes(self, sets: Sequence[EvalSet]) -> list[str]:
        """Returns notes about labels (evaluation sets included), unread media, and prompts that are JSON text."""
        lines: list[str] = []
        if self._labels is not None:
            for eval_set in sets:
                name = f"evaluation set {eval_set.name}" if eval_set.name else "the held-out rows"
                for number, row in enumerate(eval_set.rows):
                    with suppress(ValueError):  # a row without a known reward has no reward in the evaluation, either
                        self._labels.add(row, f"{name}, row {number}")
            lines += self._labels.describe()
        lines += self.unread.notes()
        if self._json_prompts:
            lines.append(f"{self._json_prompts:,} prompts are JSON text and are read as chat messages.")
        return lines

    def trained_notes(self, sets: Sequence[EvalSet]) -> Iterator[str]:
        """Yields a sentence for each evaluation set that has rows with the prompt and answer of a training row."""
        if len(self._trained) < 2:  # rows with the same prompt and answer differ in other columns
            return
        for eval_set in sets:
            if same := [number for number, row in enumerate(eval_set.rows) if _row_hash(row) in self._trained]:
                name = f"rows of evaluation set {eval_set.name}" if eval_set.name else "held-out rows"
                yield (
                    f"{len(same):,} of {len(eval_set.rows):,} {name} are trained on, with the same "
                    "prompt and answer, so an "
                    f"evaluation also measures memorization. The first is row {same[0]} of the set. Remove them "
                    "from the set or from the training rows."
                )

    def too_long_in_order(self) -> list[tuple[str, int]]:
        return [(self._source.where(number), tokens) for number, tokens in sorted(self.too_long.items())]


def _row_hash(row: DataRow) -> int:
    """Returns a hash of a data row's prompt with its media, its answer, and its seed."""
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        prompt = tuple((message["role"], _content_key(message.get("content"))) for message in prompt)
    return hash((prompt, row["answer"], str(row.get("seed"))))


def _content_key(content: Any) -> Any:
    if isinstance(content, str) or content is None:
        return content
    return tuple((part["type"], str(part.get("text")), _source_key(part.get(part["type"]))) for part in content)


def _source_key(source: Any) -> Any:
    """Returns the identity of a media item: its path, or its size with its first and last 1,024 bytes."""
    if isinstance(source, MediaSource) and source.data is not None:
        return len(source.data), source.data[:1024], source.data[-1024:]
    return source.path if isinstance(source, MediaSource) else None


def _key(config: RelaxConfig) -> str | None:
    """Returns a key for the inputs of a data check.

    Returns None if a file is missing. Also returns None if a file was just written, because its modification time may
    not show the next change.
    """
    try:
        has_files = config.data.task is None and not names_plugin(config.data)
        parts = data_parts(config.data) if has_files else []
        evaluated = [path for path in (config.data.eval_path, *config.eval.sets.values()) if path is not None]
        files = [file for path in evaluated for file in data_files(path)]
    except ValueError:
        return None
    files += [file for part in parts for file in part.files]
    files += [Path(config.data.name)] if is_file_plugin(config.data.name) else []
    if config.model.path is not None:
        folder = Path(config.model.path)
        files += [folder / name for name in (CONFIG_FILE, "tokenizer.json")]
        files += [file for file in (folder / name for name in TEMPLATE_FILES) if file.exists()]
    stats = []
    for file in files:
        if not file.is_file():
            return None
        stat = file.stat()
        if time.time() - stat.st_mtime < SETTLED_S:
            return None
        stats.append((str(file), stat.st_size, stat.st_mtime_ns, stat.st_ino))
    settings = (config.data, config.modality, config.eval, config.env, config.model, config.algo, config.seed)
    sizes = (config.engine.context_length, config.rollout.max_new_tokens, config.parallel.micro_batch_tokens)
    return repr((stats, settings, config.reward, sizes))
