"""Plays the data rows of evaluation sets: each is a group of episodes, of one turn or of several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.data import BadRow, EvalSet
from relax_core.contracts.engine import PromptRequest
from relax_core.contracts.env import CUT_ENDS
from relax_core.data.eval_sets import check_bad_rows
from relax_core.engines.engine_pool import EnginePool
from relax_core.registry import find_env
from relax_core.rollout.env_workers.run_env import RunEnv
from relax_core.rollout.episodes.episode_records import EpisodeRecord, score_episodes
from relax_core.rollout.episodes.group_player import GroupPlayer
from relax_core.rollout.evaluation.eval_metrics import Answer, vote_of
from relax_core.rollout.evaluation.evaluator import (
    EvalRow,
    PreparedSet,
    SetAnswers,
    eval_where,
    prepare_with_media,
)
from relax_core.rollout.prompt_admissions import AdmittedPrompt
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.sample_seeds import sampling_seed
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
    """Returns the answers to all sets with weights ``version`` or newer, as `play_sets` does."""
    found = await play_sets(
        sets,
        version=version,
        player=env.player(prompts, pool, evaluation_sampling(config, prompts.tokenizer), seed=0),
        prompts=prompts,
        rewards=rewards,
        most_bad=config.data.max_bad_rows,
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
) -> list[SetAnswers]:
    """Plays all rows of all sets with weights ``version`` or newer, and scores the episodes.

    ``player`` has the sampling parameters of the evaluation. The seed of a row depends on its set's name and its number
    in the set, and not on other sets. ``on_progress`` is called with the number of rows that were answered so far.
    Raises ValueError if more than the share ``most_bad`` of a set's rows cannot be used.
    """
    asked = [[_asked(one, number, version=version) for number in range(len(one.rows))] for one in sets]
    all_asked = [prompt for of_set in asked for prompt in of_set]
    found: dict[str, asyncio.Task[list[Answer]] | BadRow] = {}

    async def scored(prompt: AdmittedPrompt, episodes: Sequence[EpisodeRecord]) -> list[Answer]:
        try:
            await score_episodes(episodes, rewards, row=prompt.row, where=prompt.where, media_folder=media_folder)
        finally:
            prompts.release(prompt.uid)
        return [_answer(one, label=str(prompt.row["answer"])) for one in episodes]

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
    results = {uid: one if isinstance(one, BadRow) else one.result() for uid, one in found.items()}
    return [
        _set_answers(one, [results[prompt.uid] for prompt in of_set], most_bad=most_bad)
        for one, of_set in zip(sets, asked, strict=True)
    ]


def _asked(one: PreparedSet, number: int, *, version: int) -> AdmittedPrompt:
    """Returns row ``number`` of a set as a prompt for weights ``version`` or newer."""
    evaluation, row = f"eval/{one.name}" if one.name else "eval", one.rows[number]
    return AdmittedPrompt(
        index=number,
        row=row.row,
        where=eval_where(one.name, number),
        request=PromptRequest(
            rid=f"eval-{version}-{one.name}-{number}",
            input_ids=row.input_ids,
            sampling_seed=sampling_seed(0, index=number, purpose=evaluation),
            min_version=version,
            media=row.media,
        ),
        evaluation=evaluation,
    )


def _set_answers(one: PreparedSet, found: Sequence[list[Answer] | BadRow], *, most_bad: float) -> SetAnswers:
    bad = [*one.bad, *(each for each in found if isinstance(each, BadRow))]
    pairs = [(row, each) for row, each in zip(one.rows, found, strict=True) if not isinstance(each, BadRow)]
    check_bad_rows(one.name, len(pairs), bad, most=most_bad)
    of = PreparedSet(name=one.name, rows=[row for row, _ in pairs], bad=bad, parts=one.parts)
    return SetAnswers(of=of, answers=[answers for _, answers in pairs])


def _answer(record: EpisodeRecord, *, label: str) -> Answer:
    """Returns an episode as one answer; its text is the whole conversation, or the response of one turn."""
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
    )
