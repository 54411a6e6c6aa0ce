"""Holds the records of episodes while they are played, scores ended episodes, and computes the metrics of groups."""

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
    """Returns the text of a response's sampled tokens without the stop token; a stop string stays in it."""
    ids = response.output_ids.tolist()
    ended = response.finish_reason == "stop" and ids and ids[-1] in tokenizer.stop_token_ids
    return tokenizer.decode(ids[:-1] if ended else ids)


def stopped_by(text: str, stop: Sequence[str]) -> str | None:
    """Returns the stop string that occurs first in a text."""
    found = [(at, string) for string in stop if (at := text.find(string)) >= 0]
    return min(found)[1] if found else None


# Numbers of an episode whose means are metrics.
EPISODE_TOTALS = ("restarts", "cut_observations", "engine_s", "queue_s", "env_s", "tool_calls", "failed_calls")

# Ends without a reward that are no failure of the env or the reward; the ledger uses them as reasons, too.
NO_FAILURES: frozenset[Ended | None] = frozenset({"straggler", "stale", "cancelled"})
REWARD_FAILED = "reward_failed"  # the ledger's reason for all other episodes without a reward


@dataclass(frozen=True, kw_only=True)
class PlayedTurn:
    """Holds one request of an episode and its response.

    ``prompt_ids`` are all tokens before the response, and ``media`` places items in them. ``reward`` is that of
    this turn alone, and ``state_key`` names the state in which the response was given. Times are Unix seconds.
    ``tools`` names the tools that the response calls, and ``env_ms`` is the time of the env's calls after it.
    ``after`` is the number of the earlier turn whose conversation the prompt continues; None means the turn before.
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

    An episode of one turn has no messages, and ends as its response does.

    ``texts`` are those of the responses, and ``stop_string`` is the string that ended the newest response, empty if
    none did. ``media`` places the images and videos of the newest prompt in it. ``failed`` is the reason why the
    episode has no reward: its env raised, was too slow, or showed an image or video that cannot be used. ``error``
    is the exception. ``request`` is the rid of the request in flight, empty while there is none. ``restarts`` is
    the number of new starts, and ``not_chosen`` the number of tokens that were sampled before them. ``orphan`` is
    the number of tokens of answers that no client of an endpoint received; they are no turns. ``cut_observations``
    counts observations that were longer than their limit. ``env_s`` is the time in seconds in the env's calls.
    ``tool_calls`` counts the calls of tools, and ``failed_calls`` the responses with a call that could not be read
    or has no such tool; both and ``env_s`` include earlier starts. ``info`` has the numbers that the env gave, by
    name. ``own_reward`` is the reward that an agent gave itself, None if the run's reward scores the episode.
    ``counts`` has the counts of an agent's requests, by name, over all starts. ``output`` is the reward's output
    for the ended episode.
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
        """Returns whether the episode is a single response, without a conversation."""
        return self.ended in ("stop", "length")

    @property
    def reward(self) -> float | None:
        """Returns the reward, None if it could not be computed."""
        return self.output.reward

    @property
    def parts(self) -> dict[str, float]:
        """Returns the parts of the reward, with 1 or 0 as the part "exact"."""
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
        """Ends the episode without a reward. ``words`` may hold text of plug-ins and agents."""
        self.ended, self.failed, self.error = ended, clean_text(words, MAX_REASON), error

    def start_again(self) -> None:
        """Resets the episode for a new start; the tokens sampled so far are counted and not trained."""
        self.not_chosen += self.sampled_tokens + self.orphan
        self.orphan = 0
        self.restarts += 1
        self.messages, self.turns, self.texts, self.media = [], [], [], []
        self.ended, self.failed, self.error, self.request, self.own_reward = None, "", None, "", None

    @property
    def engine_s(self) -> float:
        """Returns the seconds from the requests of the newest start to their responses, waits included."""
        return sum(turn.ended_s - turn.began_s for turn in self.turns)

    @property
    def queue_s(self) -> float:
        """Returns the part of `engine_s` in which prompts waited in the engine, 0 if the engine does not report it."""
        return sum(turn.response.queue_ms for turn in self.turns) / 1e3

    def take_info(self, info: Mapping[str, object]) -> None:
        """Keeps the finite numbers of a step's info."""
        for name, value in info.items():
            number = as_number(value) if isinstance(value, int | float) else None
            if number is not None and too_large(number) is None:
                self.info[name].append(number)

    @property
    def bad_media(self) -> MediaError | None:
        """Returns why an image or video of the env cannot be used, or None."""
        return self.error if isinstance(self.error, MediaError) else None

    def transcript(self) -> str:
        """Returns the whole conversation as text, for tables, with marks around responses and the turns' rewards.

        Media are only named. A history that the env rewrote appears in its current form. For an episode of one
        turn, it is the response.
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
    """Returns the ended episodes of the group with this uid, in order; each has one response as its only turn."""
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
    """Holds the metrics of one group; ``tokens`` are sampled tokens, ``reward_s`` is the time of its rewards.

    ``turns`` has the number of responses of each episode, and ``straggler_turns`` only those of stragglers. ``totals``
    has sums over the episodes, by name. ``prompt_tokens`` counts the prompt tokens of all requests, and
    ``cached_tokens`` the part with keys and values in the engine's cache. ``ends`` counts the episodes by the reason of
    their end. ``info`` has the numbers that the env gave, by name, and ``counts`` the sums of the counts of agents'
    requests.
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
    """Returns the sums by name; a name whose sum is 0 stays."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return total


def played_values(played: Sequence[GroupMetrics]) -> dict[str, float]:
    """Returns the metrics of groups: means for each episode, shares of ends, means of the env's numbers.

    Episodes of one turn have only the numbers of samples and tokens.
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
    """Stores the ``output`` of each of a group's ended episodes; an episode whose env failed has no reward.

    Raises as `RewardPool.score` does, and `RewardsFailed` if too many envs fail; bad media do not count as
    failures.
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
