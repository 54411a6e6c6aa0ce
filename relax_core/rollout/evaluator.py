"""Evaluates weight versions of a run, or a model without a run, on held-out data rows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.data import BadRow, DataRow, EvalSet, question
from relax_core.contracts.engine import PromptRequest
from relax_core.contracts.env import CUT_ENDS
from relax_core.contracts.media import Media
from relax_core.contracts.reward import SHADOW
from relax_core.contracts.sink import TextCell
from relax_core.data.eval_sets import check_bad_rows
from relax_core.engines.engine_pool import EnginePool
from relax_core.observe.event_log import EVAL, SKELETONS
from relax_core.registry import find_env
from relax_core.rollout.answer_skeletons import (
    FEWEST_FIRST,
    TAKEN_OVER,
    AnswerStats,
    RightAnswer,
    answer_stats,
    skeleton_takeover,
    stats_rows,
)
from relax_core.rollout.env_workers.configured_env import ConfiguredEnv
from relax_core.rollout.episodes.episode_records import EpisodeRecord, score_episodes
from relax_core.rollout.episodes.group_player import GroupPlayer
from relax_core.rollout.eval_metrics import (
    FEWEST_VOTERS,
    Answer,
    Estimate,
    accuracy,
    k_values,
    majority_at_k,
    mean_reward,
    pass_at_k,
    shadow_values,
    vote_of,
)
from relax_core.rollout.prompt_tokens import AdmittedPrompt, PromptMaker, sampling_seed, shown_prompt
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.sampling_params import evaluation_sampling

RecordTexts = Callable[[str, int, Sequence[Mapping[str, TextCell]]], None]
Record = Callable[[str, int, Mapping[str, float]], None]
EndsRun = Callable[[int, Mapping[str, float]], Awaitable[bool]]
TEXT_ROWS = 16  # number of data rows per set with recorded answers


def eval_versions(*, every: int, start: int, total_steps: int) -> list[int]:
    """Returns the weight versions to evaluate: first, last, and multiples of ``every``; empty if ``every`` is 0."""
    if every == 0:
        return []
    return [v for v in range(start, total_steps + 1) if v in (start, total_steps) or v % every == 0]


def versions_left(planned: Sequence[int], *, reached: int, recorded: int) -> list[int]:
    """Returns the versions that a worker must evaluate if the worker starts when the run has version ``reached``.

    These are the ``planned`` versions from ``reached`` on. ``recorded`` is the version of the newest recorded
    evaluation. If a planned version between ``recorded`` and ``reached`` was missed, the engines no longer have its
    weights, so ``reached`` is evaluated in its place.
    """
    later = [version for version in planned if version >= reached]
    missing = any(recorded < version < reached for version in planned)
    return sorted({reached, *later}) if missing else later


@dataclass(frozen=True, kw_only=True)
class EvalRow:
    """Holds a data row of an evaluation set, with its prompt's token ids, images and videos."""

    row: DataRow
    input_ids: list[int]
    media: list[Media] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PreparedSet:
    """Holds an evaluation set with its prompts.

    ``bad`` has the errors of data rows without a usable prompt; metrics exclude such rows. ``parts`` are the values of
    the rows' key "part" that have separate metrics (`relax_core.contracts.data.EvalSet`).
    """

    name: str
    rows: list[EvalRow]
    bad: list[BadRow]
    parts: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class SetAnswers:
    """Holds the answers to the prompts of a set, in order."""

    of: PreparedSet
    answers: list[list[Answer]]

    @property
    def unscored(self) -> int:
        """Returns the number of answers without a reward.

        Such answers are not exact, and the mean reward excludes them.
        """
        return sum(answer.reward is None for of_prompt in self.answers for answer in of_prompt)

    def look(self) -> AnswerStats:
        """Returns the statistics of the right answers; answers of episodes with several turns are left out."""
        return answer_stats(
            [
                RightAnswer(
                    prompt=question(eval_row.row["prompt"]),
                    text=answer.text,
                    shadow=answer.shadow,
                    tokens=answer.tokens,
                )
                for eval_row, of_prompt in zip(self.of.rows, self.answers, strict=True)
                for answer in of_prompt
                if answer.exact and not answer.ended
            ]
        )

    def estimates(self) -> dict[str, Estimate]:
        """Returns accuracy and, with several answers per prompt, pass@k and maj@k; empty without data rows."""
        if not self.answers:
            return {}
        found = {"exact": accuracy(self.answers)}
        for k in k_values(len(self.answers[0])):
            found[f"pass@{k}"] = pass_at_k(self.answers, k)
            if k >= FEWEST_VOTERS:
                found[f"maj@{k}"] = majority_at_k(self.answers, k)
        return found

    def values(self) -> dict[str, float]:
        """Returns all metrics by name; NAME/low and NAME/high are the interval of the metric NAME."""
        values: dict[str, float] = {}
        for name, estimate in self.estimates().items():
            values |= {name: estimate.value, f"{name}/low": estimate.low, f"{name}/high": estimate.high}
        reward = mean_reward(self.answers)
        values["reward"] = 0.0 if reward is None else reward.value
        values |= {"rows": len(self.answers), "bad_rows": len(self.of.bad), "unscored": self.unscored}
        values |= shadow_values(self.answers) | self._episode_values()
        for part, its in self.by_part().items():
            values |= {f"{part}/{name}": value for name, value in its.values().items()}
        return values

    def _episode_values(self) -> dict[str, float]:
        """Returns the mean number of turns and the shares of the episodes' ends; empty for episodes of one turn."""
        played = [answer for of_prompt in self.answers for answer in of_prompt if answer.ended]
        ends = Counter(answer.ended for answer in played)
        shares = {f"ended/{ended}": count / len(played) for ended, count in sorted(ends.items())}
        return {"turns": fmean(answer.turns for answer in played), **shares} if played else {}

    def by_part(self) -> dict[str, SetAnswers]:
        """Returns the answers of each part with separate metrics; a part without rows is left out."""
        found = {}
        for part in self.of.parts:
            if own := [place for place, eval_row in enumerate(self.of.rows) if eval_row.row.get("part") == part]:
                rows = PreparedSet(name="", rows=[self.of.rows[place] for place in own], bad=[])
                found[part] = SetAnswers(of=rows, answers=[self.answers[place] for place in own])
        return found


def metric_names(*, samples: int, sets: Sequence[str]) -> list[str]:
    """Returns the metrics that may choose the best checkpoint, without the prefix ``eval/``."""
    metrics = ["exact", "reward"]
    for k in k_values(samples):
        metrics += [f"pass@{k}", *([f"maj@{k}"] if k >= FEWEST_VOTERS else [])]
    return metrics + [f"{name}/{figure}" for name in sets for figure in metrics]


def prepare(eval_set: EvalSet, prompts: PromptMaker, *, max_bad: float) -> PreparedSet:
    """Returns a set with its prompts; media are not encoded.

    Raises ValueError if more than the share ``max_bad`` of the set's rows cannot be used.
    """
    rows, bad = [], list(eval_set.bad)
    for number, row in enumerate(eval_set.rows):
        try:
            rows.append(EvalRow(row=row, input_ids=prompts.tokens(row, where=eval_where(eval_set.name, number))))
        except BadRow as error:
            bad.append(error)
    return _prepared(eval_set, rows, bad, max_bad=max_bad)


async def prepare_with_media(eval_set: EvalSet, prompts: PromptMaker, *, max_bad: float) -> PreparedSet:
    """Returns a set with its prompts. Images and videos are encoded once, to find rows that cannot be used.

    Raises the ValueError of `prepare`.
    """

    async def prepared(number: int, row: DataRow) -> EvalRow | BadRow:
        owner = f"prepare {eval_set.name} {number}"
        try:
            prompt = await prompts.prompt(row, where=eval_where(eval_set.name, number), owner=owner)
        except BadRow as error:
            return error
        finally:
            prompts.release(owner)
        return EvalRow(row=row, input_ids=prompt.token_ids, media=prompt.media)

    found = await asyncio.gather(*(prepared(number, row) for number, row in enumerate(eval_set.rows)))
    rows = [row for row in found if isinstance(row, EvalRow)]
    bad = [*eval_set.bad, *(row for row in found if isinstance(row, BadRow))]
    return _prepared(eval_set, rows, bad, max_bad=max_bad)


def eval_where(name: str, number: int) -> str:
    """Returns a name for row ``number`` of the set ``name``, for messages."""
    return f"eval row {number}" + (f" of {name}" if name else "")


def _prepared(eval_set: EvalSet, rows: list[EvalRow], bad: list[BadRow], *, max_bad: float) -> PreparedSet:
    check_bad_rows(eval_set.name, len(rows), bad, most=max_bad)
    return PreparedSet(name=eval_set.name, rows=rows, bad=bad, parts=eval_set.parts)


class Evaluator:
    """Runs evaluations one after the other; each starts ``steps_ahead`` train steps before its version is reached.

    ``ask(version)`` returns the answers to all sets from weights ``version`` or newer, as `play_sets` does.
    ``wait_version(version)`` returns when the run has reached this version. With ``in_order``, `gate` holds training
    prompts of a version back until the evaluation of this version is done. The engine's batches are then equal in every
    run. ``ends_run`` receives the metrics of each evaluation and returns True to end the run; after that, no prompt
    passes the gate. ``record_texts`` receives the kind, the version and the rows of text records. ``first_look`` has
    the statistics of the right answers of the run's first evaluation, or None before this evaluation.
    """

    def __init__(
        self,
        *,
        versions: Sequence[int],
        ask: Callable[[int], Awaitable[Sequence[SetAnswers]]],
        wait_version: Callable[[int], Awaitable[None]],
        in_order: bool,
        record: Record,
        record_texts: RecordTexts,
        ends_run: EndsRun | None = None,
        first_look: AnswerStats | None = None,
        steps_ahead: int = 1,
    ) -> None:
        self._first_look = first_look
        self._ask = ask
        self._steps_ahead = steps_ahead
        self._wait_version = wait_version
        self._in_order = in_order
        self._record = record
        self._record_texts = record_texts
        self._ends_run = ends_run
        self._done: dict[int, asyncio.Event] = {version: asyncio.Event() for version in versions}

    async def run(self) -> None:
        """Runs all evaluations; returns early if ``ends_run`` returns True."""
        for version, done in self._done.items():
            await self._wait_version(version - self._steps_ahead)
            if await self._evaluate(version):
                return
            done.set()

    async def gate(self, version: int) -> None:
        """With ``in_order``, waits until all evaluations of ``version`` and earlier versions are done."""
        if self._in_order:
            for due, done in self._done.items():
                if due <= version:
                    await done.wait()

    async def _evaluate(self, version: int) -> bool:
        found = await self._ask(version)
        look, notice = await self._look(found[0])
        values = evaluation_values(found) | look.values() | ({} if notice is None else {TAKEN_OVER: 1.0})
        self._record(EVAL, version, values)
        self._record_texts(EVAL, version, [text for set_answers in found for text in _texts(set_answers)])
        if look.top:
            self._record_texts(SKELETONS, version, stats_rows(look, notice=notice))
        return self._ends_run is not None and await self._ends_run(version, values)

    async def _look(self, found: SetAnswers) -> tuple[AnswerStats, str | None]:
        """Returns the statistics of a set's right answers, and a sentence if the answers look like a reward hack."""
        look = await asyncio.to_thread(found.look)
        if self._first_look is None and look.right >= FEWEST_FIRST:
            self._first_look = look
        return look, None if self._first_look is None else skeleton_takeover(self._first_look, look)


def evaluation_values(found: Sequence[SetAnswers]) -> dict[str, float]:
    """Returns the metrics of the first set as NAME, and the metrics of every named set as SET/NAME."""
    values = found[0].values()
    for set_answers in found:
        if set_answers.of.name:
            values |= {f"{set_answers.of.name}/{name}": value for name, value in set_answers.values().items()}
    return values


def _texts(found: SetAnswers) -> list[dict[str, str | bool]]:
    """Returns text records of the first data rows; each record has the first answer to the row's prompt."""
    texts: list[dict[str, str | bool]] = [
        {
            "prompt": shown_prompt(eval_row.row["prompt"], [media.item for media in eval_row.media]),
            "answer": str(eval_row.row["answer"]),
            "response": answers[0].text,
            "exact": answers[0].exact,
            "why": answers[0].why,
        }
        for eval_row, answers in list(zip(found.of.rows, found.answers, strict=True))[:TEXT_ROWS]
    ]
    return [text | {"set": found.of.name} for text in texts] if found.of.name else texts


async def prepared_sets(config: RelaxConfig, sets: Sequence[EvalSet], prompts: PromptMaker) -> list[PreparedSet]:
    """Returns the sets with their prompts; for an env of several turns, without prompts.

    Raises ValueError if more than the share data.max_bad_rows of a set's rows cannot be used.
    """
    if find_env(config.env.name).has_turns:
        return [
            PreparedSet(
                name=eval_set.name,
                rows=[EvalRow(row=row, input_ids=[]) for row in eval_set.rows],
                bad=list(eval_set.bad),
                parts=eval_set.parts,
            )
            for eval_set in sets
        ]
    return [await prepare_with_media(eval_set, prompts, max_bad=config.data.max_bad_rows) for eval_set in sets]


async def answer_sets(
    config: RelaxConfig,
    sets: Sequence[PreparedSet],
    *,
    version: int,
    pool: EnginePool,
    prompts: PromptMaker,
    rewards: RewardPool,
    env: ConfiguredEnv,
    on_progress: Callable[[int], None] = lambda count: None,
    media_folder: str = "",
) -> list[SetAnswers]:
    """Returns the answers to all sets from weights ``version`` or newer; `play_sets` explains the parameters."""
    found = await play_sets(
        sets,
        version=version,
        player=env.player(prompts, pool, evaluation_sampling(config, prompts.tokenizer), seed=0),
        prompts=prompts,
        rewards=rewards,
        max_bad=config.data.max_bad_rows,
        on_progress=on_progress,
        media_folder=media_folder,
    )
    if config.repeatable and version < config.run.steps:  # a resumed run has one more evaluation, at its start
        await pool.forget_prefixes()
    return found


async def play_sets(
    sets: Sequence[PreparedSet],
    *,
    version: int,
    player: GroupPlayer,
    prompts: PromptMaker,
    rewards: RewardPool,
    max_bad: float,
    on_progress: Callable[[int], None] = lambda count: None,
    media_folder: str = "",
) -> list[SetAnswers]:
    """Plays all rows of all sets with weights ``version`` or newer, and scores the episodes.

    ``player`` has the sampling parameters of the evaluation. The seed of a row depends only on the set's name and the
    row's number in the set. ``on_progress`` is called with the number of rows that are answered so far. Raises
    ValueError if more than the share ``max_bad`` of a set's rows cannot be used.
    """
    asked = [
        [_asked(prepared_set, number, version=version) for number in range(len(prepared_set.rows))]
        for prepared_set in sets
    ]
    all_asked = [prompt for of_set in asked for prompt in of_set]
    found: dict[str, asyncio.Task[list[Answer]] | BadRow] = {}

    async def scored(prompt: AdmittedPrompt, episodes: Sequence[EpisodeRecord]) -> list[Answer]:
        try:
            await score_episodes(episodes, rewards, row=prompt.row, where=prompt.where, media_folder=media_folder)
        finally:
            prompts.release(prompt.uid)
        return [_answer(episode, label=str(prompt.row["answer"])) for episode in episodes]

    at_once = max(1, player.evaluated_together // player.group_size)
    try:
        async with asyncio.TaskGroup() as tasks:
            async for prompt, episodes in player.groups(all_asked, tasks, at_once=at_once):
                if isinstance(episodes, BadRow):
                    found[prompt.uid] = episodes
                    prompts.release(prompt.uid)
                else:
                    found[prompt.uid] = tasks.create_task(scored(prompt, episodes))
                on_progress(len(found))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures  # the first failure cancelled the other tasks
    results = {uid: task if isinstance(task, BadRow) else task.result() for uid, task in found.items()}
    return [
        _set_answers(prepared_set, [results[prompt.uid] for prompt in of_set], max_bad=max_bad)
        for prepared_set, of_set in zip(sets, asked, strict=True)
    ]


def _asked(prepared_set: PreparedSet, number: int, *, version: int) -> AdmittedPrompt:
    """Returns row ``number`` of a set as a prompt for weights ``version`` or newer."""
    evaluation, row = f"eval/{prepared_set.name}" if prepared_set.name else "eval", prepared_set.rows[number]
    return AdmittedPrompt(
        index=number,
        row=row.row,
        where=eval_where(prepared_set.name, number),
        request=PromptRequest(
            rid=f"eval-{version}-{prepared_set.name}-{number}",
            input_ids=row.input_ids,
            sampling_seed=sampling_seed(0, index=number, purpose=evaluation),
            min_version=version,
            media=row.media,
        ),
        evaluation=evaluation,
    )


def _set_answers(prepared_set: PreparedSet, found: Sequence[list[Answer] | BadRow], *, max_bad: float) -> SetAnswers:
    bad = [*prepared_set.bad, *(result for result in found if isinstance(result, BadRow))]
    pairs = [
        (row, result) for row, result in zip(prepared_set.rows, found, strict=True) if not isinstance(result, BadRow)
    ]
    check_bad_rows(prepared_set.name, len(pairs), bad, most=max_bad)
    of = PreparedSet(name=prepared_set.name, rows=[row for row, _ in pairs], bad=bad, parts=prepared_set.parts)
    return SetAnswers(of=of, answers=[answers for _, answers in pairs])


def _answer(record: EpisodeRecord, *, label: str) -> Answer:
    """Converts an episode to one answer; the text is the whole conversation, or the response of a single turn."""
    output, cut = record.output, record.ended in CUT_ENDS
    last = record.texts[-1] if record.texts and not cut else ""
    if record.stop_string:
        last = last.partition(record.stop_string)[0]
    return Answer(
        text=record.transcript(),
        exact=output.exact,
        reward=output.reward,
        vote=vote_of(output, last, label=label),
        cut=cut,
        tokens=record.sampled_tokens,
        turns=len(record.turns),
        ended="" if record.of_one_turn else record.ended or "",
        why=output.why or output.reason,
        shadow=(output.parts or {}).get(SHADOW),
    )
