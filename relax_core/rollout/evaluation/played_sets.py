"""Evaluates the environment of a run: with several turns, each data row of a set is played as a group of episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from relax_core.config.rollout_checks import EVALUATED_TOGETHER
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.data import BadRow, EvalSet
from relax_core.contracts.env import CUT_ENDS
from relax_core.data.eval_sets import check_bad_rows
from relax_core.engines.engine_pool import EnginePool
from relax_core.registry import find_env
from relax_core.rollout.env_workers.run_env import RunEnv
from relax_core.rollout.episodes.episode_records import EpisodeRecord, score_episodes
from relax_core.rollout.episodes.played_group import GroupPlayer, GroupStart, group_name
from relax_core.rollout.episodes.shared_requests import Lockstep
from relax_core.rollout.evaluation.eval_metrics import Answer, vote_of
from relax_core.rollout.evaluation.evaluator import (
    EvalRow,
    PreparedSet,
    SetAnswers,
    ask,
    eval_where,
    prepare_with_media,
)
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.sampling_params import evaluation_sampling


async def prepared_sets(config: RelaxConfig, sets: Sequence[EvalSet], prompts: PromptMaker) -> list[PreparedSet]:
    """Returns the sets with their prompts, or without if the episodes of the environment open with their own.

    Raises ValueError if more than the share data.max_bad_rows of a set is unusable.
    """
    if find_env(config.env.name).has_turns:
        return [
            PreparedSet(
                name=one.name,
                rows=[EvalRow(row=row, input_ids=[]) for row in one.rows],
                bad=list(one.bad),
                parts=one.parts,
            )
            for one in sets
        ]
    return [await prepare_with_media(one, prompts, most_bad=config.data.max_bad_rows) for one in sets]


async def answer_sets(
    config: RelaxConfig,
    sets: Sequence[PreparedSet],
    *,
    version: int,
    pool: EnginePool,
    prompts: PromptMaker,
    rewards: RewardPool,
    env: RunEnv,
    on_progress: Callable[[int], None] = lambda count: None,
    media_folder: str = "",
) -> list[SetAnswers]:
    """Returns the answers to all sets with weights ``version`` or newer, by `ask` or, with several turns, `play_sets`.

    ``on_progress`` is called with the number of data rows that were
    answered so far.
    """
    sampling = evaluation_sampling(config, prompts.tokenizer)
    player = env.player(prompts, pool, sampling, seed=0)
    if player is not None:
        found = await play_sets(
            sets,
            version=version,
            player=player,
            prompts=prompts,
            rewards=rewards,
            most_bad=config.data.max_bad_rows,
            on_progress=on_progress,
            media_folder=media_folder,
            in_lockstep=config.rollout.lockstep,
        )
    else:
        found = await ask(
            sets,
            version=version,
            pool=pool,
            prompts=prompts,
            rewards=rewards,
            sampling=sampling,
            on_progress=on_progress,
            media_folder=media_folder,
        )
    if config.repeatable and version < config.run.steps:  # a resumed run evaluates where it begins, others do not
        await pool.forget_prefixes()
    return found


async def play_sets(
    sets: Sequence[PreparedSet],
    *,
    version: int,
    player: GroupPlayer,
    prompts: PromptMaker,
    rewards: RewardPool,
    most_bad: float,
    on_progress: Callable[[int], None] = lambda count: None,
    media_folder: str = "",
    in_lockstep: bool = False,
) -> list[SetAnswers]:
    """Plays all rows of all sets with weights ``version`` or newer, and scores the episodes.

    ``player`` has the sampling parameters of the evaluation. ``on_progress`` is called with the number of rows that
    were played so far. With ``in_lockstep``, the turns of up to `EVALUATED_TOGETHER` episodes go out together. Raises
    ValueError if more than the share ``most_bad`` of a set's rows cannot be used.
    """
    together, done = max(1, EVALUATED_TOGETHER // player.group_size), 0
    limit = asyncio.Semaphore(together)
    asked = [(one, number) for one in sets for number in range(len(one.rows))]

    async def played(one: PreparedSet, number: int, lockstep: Lockstep | None) -> list[Answer] | BadRow:
        nonlocal done
        start = _group_start(one, number, version=version, lockstep=lockstep)
        async with limit:
            try:
                records = await player.play(start, tasks)
                await score_episodes(records, rewards, row=start.row, where=start.where, media_folder=media_folder)
            except BadRow as error:
                return error
            finally:
                prompts.release(start.uid)
        done += 1
        on_progress(done)
        label = str(start.row["answer"])
        return [_answer(record, label=label) for record in records]

    playing: list[asyncio.Task[list[Answer] | BadRow]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            step, lockstep = together if in_lockstep else max(1, len(asked)), None
            for part in (asked[first : first + step] for first in range(0, len(asked), step)):
                if in_lockstep:
                    lockstep = player.lockstep([group_name(_evaluation(one), number) for one, number in part])
                    tasks.create_task(lockstep.run())
                batch = [tasks.create_task(played(one, number, lockstep)) for one, number in part]
                playing += batch
                if in_lockstep:
                    await asyncio.wait(batch)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures  # the first failure cancelled the other tasks
    found = iter([task.result() for task in playing])
    return [_set_answers(one, [next(found) for _ in one.rows], most_bad=most_bad) for one in sets]


def _group_start(one: PreparedSet, number: int, *, version: int, lockstep: Lockstep | None) -> GroupStart:
    return GroupStart(
        index=number,
        attempt=0,
        row=one.rows[number].row,
        where=eval_where(one.name, number),
        rid=f"eval-{version}-{one.name}-{number}",
        min_version=version,
        evaluation=_evaluation(one),
        lockstep=lockstep,
    )


def _evaluation(one: PreparedSet) -> str:
    return f"eval/{one.name}" if one.name else "eval"


def _set_answers(one: PreparedSet, found: Sequence[list[Answer] | BadRow], *, most_bad: float) -> SetAnswers:
    bad = [*one.bad, *(each for each in found if isinstance(each, BadRow))]
    pairs = [(row, each) for row, each in zip(one.rows, found, strict=True) if not isinstance(each, BadRow)]
    check_bad_rows(one.name, len(pairs), bad, most=most_bad)
    of = PreparedSet(name=one.name, rows=[row for row, _ in pairs], bad=bad, parts=one.parts)
    return SetAnswers(of=of, answers=[answers for _, answers in pairs])


def _answer(record: EpisodeRecord, *, label: str) -> Answer:
    """Returns an episode as one answer; its text is the whole conversation."""
    output = record.output
    last = record.texts[-1] if record.texts and record.ended not in CUT_ENDS else ""
    return Answer(
        text=record.transcript(),
        exact=output.exact,
        reward=output.reward,
        vote=vote_of(output, last, label=label),
        cut=record.ended in CUT_ENDS,
        tokens=record.sampled_tokens,
        turns=len(record.turns),
        ended=record.ended or "",
        why=output.why or output.reason,
    )
