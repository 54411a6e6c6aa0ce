"""Plays the episodes of a group with an environment of several turns, each episode at its own pace.

An episode is reset → prompt → response → step → prompt …, until the env ends the episode or a limit is reached.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from relax_core.contracts.engine import SamplingParams
from relax_core.contracts.env import (
    Action,
    BaseInteractionEnv,
    Ended,
    EnvSpec,
    EpisodeLimits,
    EpisodeStart,
    InteractionConfig,
    Message,
    StepResult,
    media_sources,
)
from relax_core.contracts.media import MediaError, MediaItem
from relax_core.contracts.plugin_results import WrongResult
from relax_core.data.tokenizer import LARGE_TEXT, PromptTokenizer, TextTooLong
from relax_core.data.turn_tokens import TurnTokens
from relax_core.engines.engine_pool import EnginePool
from relax_core.registry import plugin_error_text
from relax_core.rollout.episodes.env_calls import EnvCalls, EnvTooSlow
from relax_core.rollout.episodes.episode_records import EpisodeRecord, PlayedTurn, response_text, stopped_by
from relax_core.rollout.episodes.group_player import EarlyEnds, GroupInPlay, GroupPlayer, PlayEpisode
from relax_core.rollout.episodes.shared_requests import SharedRequests
from relax_core.rollout.episodes.tool_use import ToolUse, with_call_error
from relax_core.rollout.prompt_tokens import (
    Prompt,
    PromptMaker,
    check_prompt_tokens,
    off_loop,
    text_size,
)

MAX_CHARACTERS_A_TOKEN = 16  # only so many characters per token of the limit are tokenised


def shortened_observation(
    messages: Sequence[Message], tokenizer: PromptTokenizer, *, limit: int
) -> tuple[list[Message], bool]:
    """Returns the messages with at most about ``limit`` tokens of text, and whether a text was cut.

    The longest texts are cut in the middle, and a mark there says how many tokens are left out. The limit does not
    include the tokens of the marks and the media of content parts.
    """
    window = limit * MAX_CHARACTERS_A_TOKEN
    texts = list(_texts(messages))
    read = [text if len(text) <= 2 * window else text[:window] + text[-window:] for text in texts]
    spans = [tokenizer.plain_spans(text) for text in read]
    lengths = [len(own) for own in spans]
    if sum(lengths) <= limit and all(len(text) <= 2 * window for text in texts):
        return list(messages), False
    most = _largest_cap(lengths, limit)
    shown = iter([_cut(*pair, most=most, window=window) for pair in zip(texts, spans, strict=True)])
    return [_with_texts(message, shown) for message in messages], True


def _largest_cap(lengths: Sequence[int], limit: int) -> int:
    """Returns the largest token limit per text with which all texts together have at most ``limit`` tokens."""
    left, cap = limit, 0
    for place, length in enumerate(sorted(lengths)):
        cap = max(1, left // (len(lengths) - place))
        if length > cap:
            break
        left -= length
        cap = max(cap, length)
    return cap


def _cut(text: str, spans: Sequence[tuple[int, int]], *, most: int, window: int) -> str:
    whole = len(text) <= 2 * window
    if len(spans) <= most and whole:
        return text
    kept = min(most, len(spans))
    head = (kept + 1) // 2
    tail = kept - head
    moved = 0 if whole else len(text) - 2 * window  # the spans refer to the text without its middle
    end = spans[head - 1][1]
    begin = spans[-tail][0] + moved if tail else len(text)
    left_out = f"{len(spans) - kept} tokens" if whole else f"{begin - end} characters"
    return f"{text[:end]}\n[... {left_out} left out ...]\n{text[begin:]}"


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content if part["type"] == "text")


def _with_texts(message: Mapping[str, Any], shown: Iterator[str]) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": next(shown)}
    parts = [{**part, "text": next(shown)} if part["type"] == "text" else part for part in content]
    return {**message, "content": parts}


log = logging.getLogger(__name__)
SHOWN = 200  # characters of an opening conversation in an error


@dataclass(frozen=True, kw_only=True)
class OpenEnv:
    """Holds the open env of an episode, and the object that makes the env's calls."""

    env: BaseInteractionEnv
    calls: EnvCalls

    async def close(self) -> None:
        """Closes the env."""
        await self.calls.close(self.env.close)


@dataclass(eq=False, kw_only=True)
class EnvGroup(GroupInPlay):
    """Holds the state that the episodes of a group share; ``envs`` has the open env of each episode."""

    envs: list[OpenEnv | None]
    tools: ToolUse
    opening: list[Message] = field(default_factory=list)
    prompt: Prompt | None = None
    between: TurnTokens | None = None


@dataclass(eq=False, kw_only=True)
class NextTurn:
    """Holds the messages after a response and their media; with ``edits`` the messages replace the history."""

    messages: list[Message] = field(default_factory=list)
    items: list[MediaItem] = field(default_factory=list)
    edits: bool = False


class EpisodePlayer(GroupPlayer):
    """Plays the groups of an env of several turns.

    ``sampling.n`` is the number of episodes per group. ``sampling.max_new_tokens`` limits the sampled tokens of an
    episode. Raises ValueError if the chat template does not show the tools of the env.
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
        ends: EarlyEnds | None = None,
        in_order: bool = False,
        lockstep: bool = False,
    ) -> None:
        assert env.open is not None
        self._env = env
        self._open = env.open
        self._config = cast(InteractionConfig, env_config)
        self._shared = SharedRequests(pool, sampling)
        super().__init__(
            sampling.n,
            seed=seed,
            max_retries=self._config.max_retries,
            ends=ends,
            in_order=in_order,
            lockstep=lockstep,
            requests=self._shared,
        )
        self._prompts = prompts
        self._stop = sampling.stop
        self._limits = EpisodeLimits(
            turns=self._config.max_turns,
            sampled_tokens=sampling.max_new_tokens,
            context_tokens=prompts.max_prompt_tokens + sampling.max_new_tokens,
        )
        self._tools = ToolUse.of_env(env, self._config, prompts.tokenizer)

    @asynccontextmanager
    async def opened(self, group: GroupInPlay) -> AsyncIterator[PlayEpisode]:
        """Opens the envs of a group and makes their common prompt.

        Raises `BadRow` or ValueError, as `PromptMaker` does, if the opening conversation leaves no room for a response.
        Raises ValueError if the episodes of the group open differently, and `WrongResult` if the env violates its
        contract.
        """
        start, records, lockstep = group.start, group.records, group.lockstep
        tools = self._tools.of_row(self._env, start.row, self._config)
        own = EnvGroup(**vars(group), envs=[None] * len(records), tools=tools)
        try:
            async with asyncio.TaskGroup() as opening:
                for sample in range(len(records)):
                    opening.create_task(self._open_episode(own, sample))
            if begun := [record for record in records if record.ended is None]:
                own.opening = list(begun[0].messages)
                for record in begun[1:]:
                    self._check_opening(own, record)
                shown = tools.opening(own.opening)
                own.prompt = await self._prompts.opening(shown, where=start.where, owner=start.uid, tools=tools.schemas)
                own.between = TurnTokens(self._prompts.tokenizer, shown, tools=tools.schemas)
            if lockstep is not None:
                lockstep.leave(record.uid for record in records if record.ended is not None)
            yield partial(self._play, own)
        finally:
            if lockstep is not None:
                lockstep.leave(record.uid for record in records)
            await asyncio.gather(*(env.close() for env in own.envs if env is not None))

    async def _open_episode(self, group: EnvGroup, sample: int) -> None:
        """Opens the env of episode ``sample`` and stores its first messages; after a failure, starts again."""
        await self._reset(group, sample)
        while self.try_restart(group.records[sample]):
            await self._reset(group, sample)

    async def _reset(self, group: EnvGroup, sample: int) -> None:
        start, record = group.start, group.records[sample]
        begins = EpisodeStart(
            row=start.row,
            group_seed=start.seed(self._seed, "env"),
            episode_seed=start.seed(self._seed, f"env/{sample}"),
            attempt=start.attempt + record.restarts,
            limits=self._limits,
        )

        async def reset() -> None:
            if (before := group.envs[sample]) is not None:
                group.envs[sample] = None
                await before.close()
            calls = EnvCalls(timeout_s=self._config.step_timeout_s)
            env: BaseInteractionEnv = await calls(self._open, begins, self._config)
            group.envs[sample] = OpenEnv(env=env, calls=calls)
            observation = await calls(env.reset)
            record.messages += await calls(env.format_observation, observation)

        await self._guarded(reset(), record, where=start.where, what="reset")

    async def _play(self, group: EnvGroup, sample: int) -> None:
        """Plays one episode to its end; starts the episode again if its env fails."""
        record = group.records[sample]
        while True:
            limit = asyncio.timeout(None)
            try:
                async with limit:
                    await self._play_once(group, sample, limit)
            except TimeoutError:
                if not limit.expired():
                    raise
                self.give_up(group, [record])
                seconds = f"{self._config.episode_timeout_s:g}"
                message = f"env {self._env.name}: the episode has not ended within env.episode_timeout_s={seconds} s"
                record.fail("episode_timeout", message)
            if not self.try_restart(record):
                break
            await self._reset(group, sample)
            if record.ended is None:
                self._check_opening(group, record)
        if group.lockstep is not None:
            group.lockstep.leave([record.uid])

    async def _play_once(self, group: EnvGroup, sample: int, limit: asyncio.Timeout) -> None:
        """Plays one start of an episode turn by turn; the time of ``limit`` begins at the first response."""
        start, record, env = group.start, group.records[sample], group.envs[sample]
        if record.ended is not None:  # the env failed again before the first turn
            return
        assert group.prompt is not None and group.between is not None and env is not None
        prompt_ids, between = group.prompt.token_ids, group.between
        record.media = list(group.prompt.media)
        while record.ended is None:
            if stale := self.stale_reason(start, record):
                record.fail("stale", stale)
                return
            most, cut = self._room(record, prompt_ids)
            if most < 1:
                record.ended = cut
                return
            await self._ask(group, sample, prompt_ids, most)
            if limit.when() is None:
                limit.reschedule(asyncio.get_running_loop().time() + self._config.episode_timeout_s)
            response = record.turns[-1].response
            stopped = response.finish_reason == "stop"
            if not stopped and (cut != "turn_cut" or self._config.on_turn_cut == "end"):
                record.ended = cut
                return
            action = group.tools.read(record.texts[-1], stopped=stopped)
            record.tool_calls += len(action.tool_calls)
            record.failed_calls += bool(action.parse_error or action.call_error)
            following, what = NextTurn(), f"turn {len(record.turns)}"
            step = self._step(env, record, action, following, owner=start.uid, tools=group.tools)
            before = record.env_s
            await self._guarded(step, record, where=start.where, what=what)
            record.turns[-1] = replace(
                record.turns[-1],
                tools=[call.name for call in action.tool_calls],
                env_ms=1e3 * (record.env_s - before),
            )
            if record.ended is not None:
                return
            if following.edits:
                record.messages = list(following.messages)
                between = TurnTokens(self._prompts.tokenizer, following.messages, tools=group.tools.schemas)
                edited = partial(
                    self._prompts.edited,
                    following.messages,
                    following.items,
                    tools=group.tools.schemas,
                    most_tokens=self._limits.context_tokens,
                )
                try:
                    prompt = await off_loop(text_size(following.messages) > LARGE_TEXT, edited)
                except TextTooLong:
                    record.ended = "context_full"
                    return
                prompt_ids, record.media = prompt.token_ids, list(prompt.media)
            else:
                record.messages += following.messages
                sampled = response.output_ids.tolist()
                prompt_ids, new = between.next_prompt(prompt_ids, sampled, following.messages, following.items)
                record.media += new

    def _room(self, record: EpisodeRecord, prompt_ids: Sequence[int]) -> tuple[int, Ended]:
        """Returns the token limit of the next response, and the episode's end if the response is cut at this limit."""
        limits: list[tuple[int, Ended]] = [
            (self._limits.sampled_tokens - record.sampled_tokens, "token_budget"),
            (self._limits.context_tokens - len(prompt_ids), "context_full"),
        ]
        if self._config.max_turn_tokens is not None:
            limits.append((self._config.max_turn_tokens, "turn_cut"))
        return min(limits, key=lambda limit: limit[0])

    async def _ask(self, group: EnvGroup, sample: int, prompt_ids: list[int], most: int) -> None:
        """Requests the response to a prompt, and adds it to the episode's turns."""
        start, record = group.start, group.records[sample]
        began_s, number = time.time(), len(record.turns)
        request = self.begin_turn(group, sample, prompt_ids, most, number=number, media=record.media)
        record.request = request.rid
        if group.lockstep is None:
            response = await self._shared.generate(request, tie=start.index, tasks=group.tasks)
        else:
            response = await group.lockstep.generate(request, tie=start.index, episode=record.uid)
        record.request = ""
        group.flight.remove_request(start.index, request.rid)
        check_prompt_tokens(request, [response])
        self._too_old.sampled(int(response.versions[-1]))
        played = PlayedTurn(
            prompt_ids=prompt_ids, response=response, media=request.media, began_s=began_s, ended_s=time.time()
        )
        record.turns.append(played)
        record.texts.append(response_text(response, tokenizer=self._prompts.tokenizer))
        stopped = response.finish_reason == "stop"
        record.stop_string = (stopped_by(record.texts[-1], self._stop) or "") if stopped else ""
        record.messages.append({"role": "assistant", "content": record.texts[-1]})

    async def _step(
        self,
        opened: OpenEnv,
        record: EpisodeRecord,
        action: Action,
        following: NextTurn,
        *,
        owner: str,
        tools: ToolUse,
    ) -> None:
        """Makes a step of the env with the newest response; stores the reward, and the next messages or the end.

        The next messages with their images and videos are added to ``following``; ``owner`` then holds these images and
        videos.
        """
        env, calls = opened.env, opened.calls
        step: StepResult = await calls(env.step, action)
        record.turns[-1] = replace(record.turns[-1], reward=step.reward, state_key=step.state_key)
        record.take_info(step.info)
        if step.done:
            record.ended = "env_done"
        elif len(record.turns) >= self._config.max_turns:
            record.ended = "max_turns"
        elif step.context_edit is not None:
            following.edits = True
            following.messages += tools.opening(tools.shown(with_call_error(step.context_edit, action)))
        else:
            messages = await calls(env.format_observation, step.observation)
            observed, limit = with_call_error(messages, action), self._config.observation_tokens
            large = limit * MAX_CHARACTERS_A_TOKEN > LARGE_TEXT
            messages, cut = await off_loop(
                large, lambda: shortened_observation(observed, self._prompts.tokenizer, limit=limit)
            )
            record.cut_observations += cut
            following.messages += tools.shown(messages)
        following.items += await self._prompts.encoded(media_sources(following.messages), owner=owner)

    async def _guarded(self, call: Any, record: EpisodeRecord, *, where: str, what: str) -> None:
        """Awaits a call of the env. An error, a missed deadline or bad media end the episode.

        A wrong result ends the run.
        """
        name, began = self._env.name, time.perf_counter()
        try:
            await call
        except WrongResult as error:
            raise WrongResult(f"episode {record.uid} ({where}), {what}: {error}") from error
        except EnvTooSlow as error:
            message = f"env {name}: {what}: {error}. Raise env.step_timeout_s, or make the env faster"
            record.fail("step_timeout", message, error)
        except MediaError as error:  # drops the episode, but is not a failure of the reward
            told = MediaError(error.kind, error.word, f"{where}: env {name}: {what}: {error}")
            record.fail("bad_media", str(told), told)
        except Exception as error:  # plug-in code: the episode ends without a reward, up to reward.max_failed
            record.fail("env_failed", f"env {name}: {what}: {plugin_error_text(error)}", error)
        finally:
            record.env_s += time.perf_counter() - began

    def _check_opening(self, group: EnvGroup, record: EpisodeRecord) -> None:
        """Raises ValueError if the opening conversation of an episode differs from its group's.

        Episodes with different prompts have no common baseline.
        """
        if record.messages != group.opening:
            first = next(record for record in group.records if record.ended is None)
            raise ValueError(
                f"env {self._env.name}: {group.start.where}: the episodes of a group open differently. {first.uid}: "
                f"{str(group.opening)[:SHOWN]}. {record.uid}: {str(record.messages)[:SHOWN]}. Let reset draw from "
                "start.group_seed, which all episodes of a group have, and not from start.episode_seed."
            )
