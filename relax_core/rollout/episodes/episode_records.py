"""Defines the records of episodes in play, scores ended episodes, and computes the metrics of groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from relax_core.contracts.data import DataRow
from relax_core.contracts.engine import Generated, PromptRequest
from relax_core.contracts.env import Ended, Message
from relax_core.contracts.media import Media, MediaError, MediaSource
from relax_core.contracts.plugin_results import as_number, too_large
from relax_core.contracts.reward import MAX_REASON, UNCONFIRMED, RewardInput, RewardOutput
from relax_core.contracts.sink import SAMPLED_MARKS
from relax_core.contracts.tree import sample_uid
from relax_core.contracts.untrusted_values import clean_text
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.rollout.rewards.reward_pool import RewardPool


def without_bytes(value: Any) -> Any:
    """Returns a data row or a conversation with each `MediaSource` replaced by its path or its number of bytes."""
    if isinstance(value, MediaSource):
        return value.description
    if isinstance(value, Mapping):
        return {key: without_bytes(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_bytes(element) for element in value]
    return value


def response_text(response: Generated, *, tokenizer: PromptTokenizer) -> str:
    """Returns the text of a response's sampled tokens without the stop token; a stop string stays in the text."""
    ids = response.output_ids.tolist()
    ended = response.finish_reason == "stop" and ids and ids[-1] in tokenizer.stop_token_ids
    return tokenizer.decode(ids[:-1] if ended else ids)


def stopped_by(text: str, stop: Sequence[str]) -> str | None:
    """Returns the stop string that occurs first in a text."""
    found = [(at, string) for string in stop if (at := text.find(string)) >= 0]
    return min(found)[1] if found else None


# Numbers of an episode; their means are metrics.
EPISODE_TOTALS = ("restarts", "cut_observations", "engine_s", "queue_s", "env_s", "tool_calls", "failed_calls")

# Ends without a reward that are not failures of the env or the reward. The ledger uses these ends as reasons, too.
NO_FAILURES: frozenset[Ended | None] = frozenset({"straggler", "stale", "cancelled"})
REWARD_FAILED = "reward_failed"  # the ledger's reason for all other episodes without a reward


@dataclass(frozen=True, kw_only=True)
class PlayedTurn:
    """Holds one request of an episode and its response.

    ``prompt_ids`` are all tokens before the response, and ``media`` has the positions of media items in these tokens.
    ``reward`` is the env's reward for this turn only. ``state_key`` names the state of the env before the response.
    Times are Unix seconds. ``tools`` names the tools that the response calls. ``env_ms`` is the time of the env's calls
    after the response. ``after`` is the number of the earlier turn that the prompt continues; None means the previous
    turn.
    """

    prompt_ids: Sequence[int] | np.ndarray
    response: Generated
    media: Sequence[Media] = ()
    reward: float | None = None
    state_key: str | None = None
    began_s: float = 0.0
    ended_s: float = 0.0
    tools: Sequence[str] = ()
    env_ms: float = 0.0
    after: int | None = None


@dataclass(eq=False, kw_only=True)
class EpisodeRecord:
    """Holds the messages, turns and state of one episode.

    An episode of one turn has no messages, and its end is the finish reason of its response.

    ``texts`` are the texts of the responses. ``stop_string`` is the stop string that ended the newest response, or
    empty. ``media`` has the positions of images and videos in the newest prompt. ``failed`` is the reason of an episode
    without a reward; for example, the env raised an exception, was too slow, or showed an image or video that cannot be
    used. ``error`` is the exception. ``request`` is the rid of the request in flight, or empty. ``restarts`` is the
    number of new starts after failures, and ``not_chosen`` is the number of tokens that were sampled before the newest
    start. ``orphan`` is the number of tokens of answers that no client of an endpoint received; such answers are not in
    ``turns``. ``cut_observations`` counts the observations that were cut at their limit. ``env_s`` is the time of the
    env's calls in seconds. ``tool_calls`` counts calls of tools. ``failed_calls`` counts responses with a call that
    cannot be parsed or that names an unknown tool. The three numbers ``env_s``, ``tool_calls`` and ``failed_calls``
    include earlier starts. ``info`` has the numbers from the env, by name. ``own_reward`` is the reward that the
    episode's agent computed, None if the run's reward scores the episode. ``counts`` has the counts of the agent's
    requests, by name, over all starts. ``output`` is the reward's output for the ended episode.
    """

    uid: str
    messages: list[Message] = field(default_factory=list)
    turns: list[PlayedTurn] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    stop_string: str = ""
    media: list[Media] = field(default_factory=list)
    ended: Ended | None = None
    failed: str = ""
    error: Exception | None = None
    request: str = ""
    restarts: int = 0
    not_chosen: int = 0
    orphan: int = 0
    cut_observations: int = 0
    env_s: float = 0.0
    tool_calls: int = 0
    failed_calls: int = 0
    info: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    own_reward: float | None = None
    counts: Counter[str] = field(default_factory=Counter)
    output: RewardOutput = field(default_factory=partial(RewardOutput, reward=None))

    @property
    def of_one_turn(self) -> bool:
        """Returns True if the episode is a single response without a conversation."""
        return self.ended in ("stop", "length")

    @property
    def reward(self) -> float | None:
        """Returns the reward; None if the episode has no reward."""
        return self.output.reward

    @property
    def parts(self) -> dict[str, float]:
        """Returns the parts of the reward by name; the part "exact" is 1 or 0."""
        return {"exact": float(self.output.exact), **(self.output.parts or {})}

    @property
    def why_dropped(self) -> str:
        """Returns the ledger's reason for an episode without a reward."""
        if self.bad_media is not None:
            return self.bad_media.reason
        if self.output.cause == UNCONFIRMED:
            return UNCONFIRMED
        return self.ended if self.ended is not None and self.ended in NO_FAILURES else REWARD_FAILED

    @property
    def sampled_tokens(self) -> int:
        """Returns the number of tokens that were sampled since the newest start."""
        return sum(len(turn.response.output_ids) for turn in self.turns)

    def turn_versions(self) -> list[int]:
        """Returns the version of the oldest token of each turn."""
        return [int(turn.response.versions.min()) for turn in self.turns]

    def fail(self, ended: Ended, words: str, error: Exception | None = None) -> None:
        """Ends the episode without a reward. ``words`` is the reason; it may contain text of plug-ins and agents."""
        self.ended, self.failed, self.error = ended, clean_text(words, MAX_REASON), error

    def start_again(self) -> None:
        """Resets the episode for a new start; the tokens sampled so far are counted in ``not_chosen``."""
        self.not_chosen += self.sampled_tokens + self.orphan
        self.orphan = 0
        self.restarts += 1
        self.messages, self.turns, self.texts, self.media = [], [], [], []
        self.ended, self.failed, self.error, self.request, self.own_reward = None, "", None, "", None

    @property
    def engine_s(self) -> float:
        """Returns the seconds from requests to responses in the newest start, including waits in the engine."""
        return sum(turn.ended_s - turn.began_s for turn in self.turns)

    @property
    def queue_s(self) -> float:
        """Returns the seconds of `engine_s` in which prompts waited in the engine; 0 if the engine reports no waits."""
        return sum(turn.response.queue_ms for turn in self.turns) / 1e3

    def take_info(self, info: Mapping[str, object]) -> None:
        """Adds the finite numbers of a step's info to ``info``."""
        for name, value in info.items():
            number = as_number(value) if isinstance(value, int | float) else None
            if number is not None and too_large(number) is None:
                self.info[name].append(number)

    @property
    def bad_media(self) -> MediaError | None:
        """Returns the error of an image or video that cannot be used, or None."""
        return self.error if isinstance(self.error, MediaError) else None

    def transcript(self) -> str:
        """Returns the whole conversation as text for tables, with the turns' rewards and marks around responses.

        Media are replaced by their kind. A history that the env rewrote appears in its current form. For an episode of
        one turn, the text is the response.
        """
        if self.of_one_turn:
            return self.texts[-1]
        before, behind = SAMPLED_MARKS
        rewards = [turn.reward for turn in self.turns]
        lines = []
        for message in reversed(self.messages):
            text = _shown_content(message["content"])
            if message["role"] == "assistant" and rewards:
                reward = rewards.pop()
                text = f"{before}{text}{behind}" + ("" if reward is None else f" [reward {reward:g}]")
            lines.append(f"{message['role']}: {text}")
        return "\n".join([*reversed(lines), f"[{self.ended}]"])

    def reward_input(self, row: DataRow, where: str, *, media_folder: str = "") -> RewardInput:
        """Returns the input of the reward for this episode."""
        items, talk = [medium.item for medium in self.media], not self.of_one_turn
        return RewardInput(
            response=self.texts[-1] if self.texts else "",
            stopped=bool(self.turns) and self.turns[-1].response.finish_reason == "stop",
            answer=str(row["answer"]),
            row=without_bytes(row) if items else row,
            uid=self.uid,
            where=where,
            turns=self.texts if talk else (),
            turn_rewards=[turn.reward for turn in self.turns] if talk else (),
            messages=without_bytes(self.messages) if items else self.messages,
            ended=(self.ended or "") if talk else "",
            media=items,
            media_folder=media_folder,
            stop_string=self.stop_string,
        )


def one_turn_episodes(
    group: str,
    prompt: PromptRequest,
    responses: Sequence[Generated],
    *,
    tokenizer: PromptTokenizer,
    stop: Sequence[str] = (),
) -> list[EpisodeRecord]:
    """Returns the episodes of a group, in order; each episode has ended and has one response as its only turn."""
    prompt_ids = np.array(prompt.input_ids, dtype=np.int32)
    episodes = []
    for response in sorted(responses, key=lambda response: response.sample):
        text, stopped = response_text(response, tokenizer=tokenizer), response.finish_reason == "stop"
        record = EpisodeRecord(
            uid=sample_uid(group, response.sample),
            turns=[PlayedTurn(prompt_ids=prompt_ids, response=response, media=prompt.media)],
            texts=[text],
            stop_string=(stopped_by(text, stop) or "") if stopped else "",
            media=prompt.media,
            ended="stop" if stopped else "length",
        )
        episodes.append(record)
    return episodes


def _shown_content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)


@dataclass(frozen=True, kw_only=True)
class GroupMetrics:
    """Holds the metrics of one group.

    ``turns`` has the number of responses of each episode. ``straggler_turns`` has these numbers for stragglers only.
    ``tokens`` is the number of sampled tokens, and ``reward_s`` the time of the group's rewards in seconds. ``totals``
    has sums over the episodes, by name. ``prompt_tokens`` counts the prompt tokens of all requests; ``cached_tokens``
    of them had keys and values in the engine's cache. ``ends`` counts the episodes by their end. ``info`` has the
    numbers from the env, by name. ``counts`` has the sums of the counts of agents' requests, by name.
    """

    of_one_turn: bool
    turns: Sequence[int]
    straggler_turns: Sequence[int]
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    newest_version: int
    reward_s: float
    totals: Mapping[str, float]
    ends: Mapping[str, int]
    info: Mapping[str, Sequence[float]]
    counts: Mapping[str, int]

    @staticmethod
    def of(records: Sequence[EpisodeRecord], *, reward_s: float) -> GroupMetrics:
        """Returns the metrics of a group's episodes."""
        responses = [turn.response for record in records for turn in record.turns]
        info: dict[str, list[float]] = defaultdict(list)
        for record in records:
            for name, values in record.info.items():
                info[name] += values
        return GroupMetrics(
            of_one_turn=all(record.of_one_turn for record in records),
            turns=[len(record.turns) for record in records],
            straggler_turns=[len(record.turns) for record in records if record.ended == "straggler"],
            tokens=sum(len(response.output_ids) for response in responses),
            prompt_tokens=sum(len(turn.prompt_ids) for record in records for turn in record.turns),
            cached_tokens=sum(response.cached_tokens for response in responses),
            newest_version=max((int(response.versions[-1]) for response in responses), default=0),
            reward_s=reward_s,
            totals={name: sum(float(getattr(record, name)) for record in records) for name in EPISODE_TOTALS},
            ends=Counter(record.ended or "" for record in records),
            info=info,
            counts=_summed(record.counts for record in records),
        )


def _summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Returns the sums by name, including sums of 0."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return total


def played_values(played: Sequence[GroupMetrics]) -> dict[str, float]:
    """Returns the metrics of groups: means per episode, shares of ends, and means of the env's numbers.

    For episodes of one turn, the metrics are only the numbers of samples and tokens.
    """
    turns = [count for played_figures in played for count in played_figures.turns]
    sizes = {"samples": float(len(turns)), "tokens": float(sum(played_figures.tokens for played_figures in played))}
    if all(played_figures.of_one_turn for played_figures in played):
        return sizes
    slow = [count for played_figures in played for count in played_figures.straggler_turns]
    prompt_tokens = sum(played_figures.prompt_tokens for played_figures in played)
    ends: Counter[str] = Counter()
    info: dict[str, list[float]] = defaultdict(list)
    for played_figures in played:
        ends.update(played_figures.ends)
        for name, values in played_figures.info.items():
            info[name] += values
    return {
        **sizes,
        "turns": fmean(turns),
        **{f"turns/p{share}": float(np.percentile(turns, share)) for share in (50, 90, 99)},
        "prompt_tokens": prompt_tokens,
        "cached_share": sum(played_figures.cached_tokens for played_figures in played) / max(1, prompt_tokens),
        **{name: sum(played_figures.totals[name] for played_figures in played) / len(turns) for name in EPISODE_TOTALS},
        **({"straggler_turns": fmean(slow)} if slow else {}),
        **{f"ended/{reason}": count / len(turns) for reason, count in sorted(ends.items())},
        **{f"env/{name}": sum(values) / len(values) for name, values in sorted(info.items())},
        **{
            f"agent/{name}": count / len(turns)
            for name, count in sorted(_summed(played_figures.counts for played_figures in played).items())
        },
    }


async def score_episodes(
    records: Sequence[EpisodeRecord], rewards: RewardPool, *, row: DataRow, where: str, media_folder: str = ""
) -> None:
    """Scores a group's ended episodes and stores their ``output``; an episode with a failed env has no reward.

    Raises the errors of `RewardPool.score`, and `RewardsFailed` if too many envs fail. Images and videos that cannot be
    used are not counted as failures.
    """
    inputs = {record.uid: record.reward_input(row, where, media_folder=media_folder) for record in records}
    whole = [record for record in records if not record.failed and record.own_reward is None]
    outputs = await rewards.score([inputs[record.uid] for record in whole]) if whole else []
    for record, output in zip(whole, outputs, strict=True):
        record.output = output
    for record in records:
        if record.own_reward is not None and not record.failed:
            why = f"the agent's own reward {record.own_reward:g}"
            record.output = RewardOutput(reward=record.own_reward, exact=record.own_reward == 1.0, why=why)
            rewards.failures.record(inputs[record.uid], record.output)
    for record in records:
        if record.failed:
            record.output = RewardOutput(reward=None, reason=record.failed)
            if record.bad_media is None and record.ended not in NO_FAILURES:
                rewards.failures.record(inputs[record.uid], record.output, record.error)
