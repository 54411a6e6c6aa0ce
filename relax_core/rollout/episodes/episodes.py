"""Plays the episodes of a group with an environment of several turns, each episode at its own pace.

An episode is reset → prompt → response → step → prompt …, until the env says done, the limit of turns is reached, a
response is cut, or the context is full.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from relax_core.contracts.checks.plugin_results import WrongResult
from relax_core.contracts.data import DataRow
from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.contracts.env import (
    Action,
    BaseInteractionEnv,
    Ended,
    EnvSpec,
    EpisodeStart,
    InteractionConfig,
    Message,
    StepResult,
    media_sources,
)
from relax_core.contracts.media import Media, MediaError, MediaItem
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.contracts.tree import group_uid, sample_uid
from relax_core.data.turn_tokens import TurnTokens
from relax_core.engines.pool.engine_pool import EnginePool
from relax_core.registry import plugin_words
from relax_core.rollout.episodes.env_calls import EnvCalls, EnvTooSlow
from relax_core.rollout.episodes.shared_requests import SharedRequests
from relax_core.rollout.episodes.tree_builder import PlayedEpisode, PlayedTurn
from relax_core.rollout.prompt_tokens import Prompt, PromptMaker, check_prompt_tokens
from relax_core.rollout.rewards.reward_inputs import response_text, without_bytes
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.sample_seeds import sampling_seed

SHOWN = 200  # the characters of an opening that an error shows


@dataclass(frozen=True, kw_only=True)
class GroupStart:
    """Is a group whose episodes are about to start.

    ``rid`` is the prefix of its requests' names. ``where`` is the data row's file and line. `PromptRequest` explains
    ``min_version``. ``on_request`` and ``on_response`` are called with a request's name when the request is sent and
    when its response has arrived.
    """

    index: int
    attempt: int
    row: DataRow
    where: str
    rid: str
    min_version: int
    on_request: Callable[[str], None] = lambda rid: None
    on_response: Callable[[str], None] = lambda rid: None


@dataclass(frozen=True, kw_only=True)
class OpenEnv:
    """Is the env of an episode that has started, with the object that calls it."""

    env: BaseInteractionEnv
    calls: EnvCalls


@dataclass(eq=False, kw_only=True)
class EpisodeRecord:
    """Holds the messages, turns and state of one episode.

    ``media`` places the images and videos of the newest prompt in it. ``failed`` says why the episode has no reward if
    its env raised or was too slow, or showed an image or video that cannot be used. ``error`` is what was raised.
    """

    uid: str
    messages: list[Message] = field(default_factory=list)
    turns: list[PlayedTurn] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)
    ended: Ended | None = None
    failed: str = ""
    error: Exception | None = None

    def fail(self, ended: Ended, words: str, error: Exception | None) -> None:
        """Ends the episode without a reward."""
        self.ended, self.failed, self.error = ended, words, error

    @property
    def bad_media(self) -> MediaError | None:
        """Returns why an image or video of the env cannot be used, or None."""
        return self.error if isinstance(self.error, MediaError) else None

    def reward_input(self, row: DataRow, where: str, *, media_folder: str = "") -> RewardInput:
        """Returns the input of the reward for this episode."""
        items = [one.item for one in self.media]
        return RewardInput(
            response=self.texts[-1] if self.texts else "",
            stopped=bool(self.turns) and self.turns[-1].response.finish_reason == "stop",
            answer=str(row["answer"]),
            row=without_bytes(row) if items else row,
            uid=self.uid,
            where=where,
            turns=self.texts,
            turn_rewards=[turn.reward for turn in self.turns],
            messages=without_bytes(self.messages) if items else self.messages,
            ended=self.ended or "",
            media=items,
            media_folder=media_folder,
        )


class EpisodePlayer:
    """Plays the groups of an env of several turns.

    ``sampling.n`` is the number of episodes per group, and ``sampling.max_new_tokens`` the limit of one turn. ``seed``
    is the run's seed.
    """

    def __init__(
        self,
        *,
        env: EnvSpec,
        env_config: Any,
        prompts: PromptMaker,
        pool: EnginePool,
        sampling: SamplingParams,
        seed: int,
    ) -> None:
        assert env.open is not None
        self._name = env.name
        self._open = env.open
        self._config = cast(InteractionConfig, env_config)
        self._prompts = prompts
        self._requests = SharedRequests(pool, sampling)
        self._group_size = sampling.n
        self._stop = sampling.stop
        self._seed = seed

    async def play(self, start: GroupStart, tasks: asyncio.TaskGroup) -> list[EpisodeRecord]:
        """Returns the ended episodes of a group in order; `SharedRequests.generate` explains ``tasks``.

        Raises `BadRow` or ValueError if the opening leaves no room for a response, as `PromptMaker` does; ValueError if
        the episodes of the group open differently; `WrongResult` if the env returns what its contract does not allow.
        """
        uid = group_uid(start.index)
        records = [EpisodeRecord(uid=sample_uid(uid, sample)) for sample in range(self._group_size)]
        opened: list[OpenEnv | None] = [None] * len(records)
        try:
            async with asyncio.TaskGroup() as opening:
                for sample, record in enumerate(records):
                    opening.create_task(self._reset(start, sample, record, opened))
            begun = [record for record in records if record.ended is None]
            if begun:
                _check_openings(begun, name=self._name, where=start.where)
                messages = list(begun[0].messages)
                prompt = await self._prompts.opening(messages, where=start.where, owner=uid)
                between = TurnTokens(self._prompts.tokenizer, messages)
                async with asyncio.TaskGroup() as playing:
                    for sample, (record, env) in enumerate(zip(records, opened, strict=True)):
                        if env is not None and record.ended is None:
                            playing.create_task(self._play(start, sample, record, env, prompt, between, tasks))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # the first failure cancelled the other tasks
        finally:
            await asyncio.gather(*(one.calls.close(one.env.close) for one in opened if one is not None))
        return records

    async def _reset(self, start: GroupStart, sample: int, record: EpisodeRecord, opened: list[OpenEnv | None]) -> None:
        """Opens the env of episode ``sample`` and stores its first messages."""
        begins = EpisodeStart(
            row=start.row,
            group_seed=sampling_seed(self._seed, index=start.index, purpose="env"),
            episode_seed=sampling_seed(self._seed, index=start.index, purpose=f"env/{sample}"),
            attempt=start.attempt,
        )

        async def reset() -> None:
            calls = EnvCalls(timeout_s=self._config.step_timeout_s)
            env: BaseInteractionEnv = await calls(self._open, begins, self._config)
            opened[sample] = OpenEnv(env=env, calls=calls)
            observation = await calls(env.reset)
            record.messages += await calls(env.format_observation, observation)

        await self._guarded(reset(), record, where=start.where, what="reset")

    async def _play(
        self,
        start: GroupStart,
        sample: int,
        record: EpisodeRecord,
        env: OpenEnv,
        prompt: Prompt,
        between: TurnTokens,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Plays one episode turn by turn until it has ended."""
        prompt_ids = prompt.token_ids
        record.media = list(prompt.media)
        while record.ended is None:
            number = len(record.turns)
            request = PromptRequest(
                rid=f"{start.rid}.{sample}.{number}",
                input_ids=prompt_ids,
                sampling_seed=sampling_seed(self._seed, index=start.index, purpose=f"train/{sample}/{number}"),
                min_version=start.min_version,
                media=list(record.media),
            )
            began_s = time.time()
            start.on_request(request.rid)
            response = await self._requests.generate(request, tie=start.index, tasks=tasks)
            start.on_response(request.rid)
            check_prompt_tokens(request, [response])
            played = PlayedTurn(
                prompt_ids=prompt_ids, response=response, media=request.media, began_s=began_s, ended_s=time.time()
            )
            record.turns.append(played)
            record.texts.append(response_text(response, tokenizer=self._prompts.tokenizer, stop=self._stop))
            record.messages.append({"role": "assistant", "content": record.texts[-1]})
            if response.finish_reason != "stop":
                record.ended = "turn_cut"
                return
            messages, items = list[Message](), list[MediaItem]()
            what = f"turn {number + 1}"
            step = self._step(env, record, messages, items, owner=group_uid(start.index))
            await self._guarded(step, record, where=start.where, what=what)
            if record.ended is not None:
                return
            record.messages += messages
            prompt_ids, new = between.next_prompt(prompt_ids, response.output_ids.tolist(), messages, items)
            record.media += new
            if len(prompt_ids) > self._prompts.max_prompt_tokens:
                record.ended = "context_full"

    async def _step(
        self, opened: OpenEnv, record: EpisodeRecord, messages: list[Message], items: list[MediaItem], *, owner: str
    ) -> None:
        """Stores the reward for the newest response, and the ``messages`` that follow it or the end of the episode.

        ``items`` gets the images and videos of these messages, which ``owner`` then holds.
        """
        env, calls = opened.env, opened.calls
        step: StepResult = await calls(env.step, Action(text=record.texts[-1], stopped=True))
        record.turns[-1] = replace(record.turns[-1], reward=step.reward)
        if step.done:
            record.ended = "env_done"
        elif len(record.turns) >= self._config.max_turns:
            record.ended = "max_turns"
        else:
            messages += await calls(env.format_observation, step.observation)
            items += await self._prompts.encoded(media_sources(messages), owner=owner)

    async def _guarded(self, call: Any, record: EpisodeRecord, *, where: str, what: str) -> None:
        """Awaits a call of the env. An error, a missed deadline or bad media end the episode.

        A wrong result ends the run.
        """
        try:
            await call
        except WrongResult as error:
            raise WrongResult(f"episode {record.uid} ({where}), {what}: {error}") from error
        except EnvTooSlow as error:
            words = f"env {self._name}: {what}: {error}. Raise env.step_timeout_s, or make the env faster"
            record.fail("step_timeout", words, error)
        except MediaError as error:  # as in a data row, it costs its episode and is no failure of the reward
            told = MediaError(error.kind, error.word, f"{where}: env {self._name}: {what}: {error}")
            record.fail("bad_media", str(told), told)
        except Exception as error:  # plug-in code: the episode ends without a reward, up to reward.max_failed
            record.fail("env_failed", f"env {self._name}: {what}: {plugin_words(error)}", error)


def _check_openings(begun: Sequence[EpisodeRecord], *, name: str, where: str) -> None:
    """Raises ValueError if an episode opens differently than the first one.

    Episodes with different prompts have no common baseline.
    """
    first = begun[0]
    for other in begun[1:]:
        if other.messages != first.messages:
            raise ValueError(
                f"env {name}: {where}: the episodes of a group open differently. {first.uid}: "
                f"{str(first.messages)[:SHOWN]}. {other.uid}: {str(other.messages)[:SHOWN]}. Let reset draw from "
                "start.group_seed, which all episodes of a group have, and not from start.episode_seed."
            )


@dataclass(frozen=True, kw_only=True)
class PlayedFigures:
    """Holds the figures of one group; ``tokens`` are sampled ones, ``reward_s`` is the time of its rewards."""

    episodes: int
    turns: int
    tokens: int
    newest_version: int
    reward_s: float

    @staticmethod
    def of(records: Sequence[EpisodeRecord], *, reward_s: float) -> PlayedFigures:
        """Returns the figures of a group's episodes."""
        responses = [turn.response for record in records for turn in record.turns]
        return PlayedFigures(
            episodes=len(records),
            turns=len(responses),
            tokens=sum(len(one.output_ids) for one in responses),
            newest_version=max((int(one.versions[-1]) for one in responses), default=0),
            reward_s=reward_s,
        )


async def score_episodes(
    records: Sequence[EpisodeRecord], rewards: RewardPool, *, row: DataRow, where: str, media_folder: str = ""
) -> list[PlayedEpisode]:
    """Returns the episodes with their rewards, in order; an episode whose env failed has no reward.

    Raises what `RewardPool.score` raises, and `RewardsFailed` if too many envs fail, among which bad media do
    not count.
    """
    inputs = {record.uid: record.reward_input(row, where, media_folder=media_folder) for record in records}
    whole = [record for record in records if not record.failed]
    outputs = await rewards.score([inputs[record.uid] for record in whole]) if whole else []
    scored = {record.uid: output for record, output in zip(whole, outputs, strict=True)}
    for record in records:
        if record.failed:
            output = scored[record.uid] = RewardOutput(reward=None, reason=record.failed)
            if record.bad_media is None:
                rewards.failures.record(inputs[record.uid], output, record.error)
    return [
        PlayedEpisode(
            uid=record.uid,
            turns=record.turns,
            reward=output.reward,
            parts={"exact": float(output.exact), **(output.parts or {})},
            ended=record.ended or "",
            dropped="" if record.bad_media is None else record.bad_media.reason,
        )
        for record in records
        for output in [scored[record.uid]]
    ]
