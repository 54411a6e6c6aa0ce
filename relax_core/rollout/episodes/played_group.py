"""Holds what the episodes of one group share while they are played, and ends those that the group goes on without."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relax_core.contracts.data import DataRow
from relax_core.contracts.env import REWARDED_ENDS, BaseInteractionEnv, Ended, Message
from relax_core.contracts.media import MediaItem
from relax_core.contracts.tree import group_uid
from relax_core.data.turn_tokens import TurnTokens
from relax_core.rollout.episodes.env_calls import EnvCalls
from relax_core.rollout.episodes.episode_records import EpisodeRecord
from relax_core.rollout.episodes.shared_requests import Lockstep
from relax_core.rollout.episodes.tool_use import ToolUse
from relax_core.rollout.prompt_tokens import Prompt
from relax_core.rollout.sample_seeds import sampling_seed

# Ends of an attempt after which the episode starts again from its reset, because the failure may not occur twice.
STARTS_AGAIN: frozenset[Ended | None] = frozenset({"env_failed", "step_timeout"})


@dataclass(frozen=True, kw_only=True)
class EarlyEnds:
    """Says which episodes of the training end before their env says so.

    A group is complete when the share ``quorum`` of its episodes has ended with a reward; the others have ``grace_s``
    seconds more and then end as stragglers. An episode whose oldest token is more than ``most_lag`` weight versions
    older than the newest that was seen ends at its next turn, because no train step can take it; None means never.
    """

    quorum: float = 1.0
    grace_s: float = 0.0
    most_lag: int | None = None

    def needed(self, group_size: int) -> int:
        """Returns how many episodes of a group must end with a reward."""
        return math.ceil(round(self.quorum * group_size, 6))


@dataclass(frozen=True, kw_only=True)
class GroupStart:
    """Is a group whose episodes are about to start.

    ``evaluation`` is empty for training; it names the evaluation set whose row ``index`` this is, so that its seeds and
    uids are its own. ``rid`` is the prefix of its requests' names. ``where`` is the data row's file and line.
    `PromptRequest` explains ``min_version``. ``on_request`` and ``on_response`` are called with a request's name when
    the request is sent and when its response has arrived. ``on_cancelled`` is called with the episodes of a group that
    is given up. ``lockstep`` sends the turns of the group's prompt batch together; None sends each when it is ready.
    """

    index: int
    attempt: int
    row: DataRow
    where: str
    rid: str
    min_version: int
    evaluation: str = ""
    on_request: Callable[[str], None] = lambda rid: None
    on_response: Callable[[str], None] = lambda rid: None
    on_cancelled: Callable[[Sequence[EpisodeRecord]], None] = lambda records: None
    lockstep: Lockstep | None = None

    @property
    def uid(self) -> str:
        """Returns the uid of the group, which holds its media."""
        return group_name(self.evaluation, self.index)

    def cancelled(self, records: Sequence[EpisodeRecord]) -> None:
        """Ends the episodes of a group that is given up, and tells ``on_cancelled``."""
        for record in records:
            if record.ended is None:
                record.fail("cancelled", "the group was given up")
        self.on_cancelled(records)

    def seed(self, of_run: int, purpose: str) -> int:
        """Returns the seed of the group for a purpose, such as "env"."""
        return sampling_seed(of_run, index=self.index, purpose=f"{self.evaluation}/{purpose}".removeprefix("/"))


def group_name(evaluation: str, index: int) -> str:
    """Returns the uid of the group of row ``index`` of an evaluation set, or of a training group if that is empty."""
    return f"{evaluation}/{index}" if evaluation else group_uid(index)


@dataclass(frozen=True, kw_only=True)
class OpenEnv:
    """Is the env of an episode that has started, with the object that calls it."""

    env: BaseInteractionEnv
    calls: EnvCalls

    async def close(self) -> None:
        """Closes the env."""
        await self.calls.close(self.env.close)


@dataclass(eq=False, kw_only=True)
class PlayedGroup:
    """Holds what the episodes of a group share; ``envs`` has the open env of each."""

    start: GroupStart
    records: list[EpisodeRecord]
    envs: list[OpenEnv | None]
    tools: ToolUse
    tasks: asyncio.TaskGroup
    opening: list[Message] = field(default_factory=list)
    prompt: Prompt | None = None
    between: TurnTokens | None = None


class GroupPlayer(Protocol):
    """Declares what the rollout and evaluations need of what plays the groups of an env of several turns."""

    @property
    def group_size(self) -> int:
        """Returns the number of episodes of a group."""

    async def play(self, start: GroupStart, tasks: asyncio.TaskGroup) -> list[EpisodeRecord]:
        """Returns the ended episodes of a group in order; `SharedRequests.generate` explains ``tasks``."""

    def lockstep(self, groups: Iterable[str]) -> Lockstep:
        """Returns what sends the turns of these groups together."""


@dataclass(eq=False, kw_only=True)
class NextTurn:
    """Holds what follows a response: ``messages`` and their ``items``, in place of the history if ``edits``."""

    messages: list[Message] = field(default_factory=list)
    items: list[MediaItem] = field(default_factory=list)
    edits: bool = False


async def end_stragglers(
    playing: Mapping[asyncio.Task[None], EpisodeRecord],
    ends: EarlyEnds,
    *,
    group_size: int,
    give_up: Callable[[Sequence[EpisodeRecord]], None],
) -> None:
    """Waits for the quorum of a group and for the grace, then cancels the tasks of the other episodes.

    ``give_up`` ends the requests under way of such episodes. Returns when all tasks are done or cancelled.
    """
    pending, needed = set(playing), ends.needed(group_size)
    while pending and sum(record.ended in REWARDED_ENDS for record in playing.values()) < needed:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    if not pending:
        return
    _, pending = await asyncio.wait(pending, timeout=ends.grace_s)
    for task in pending:
        task.cancel()
        playing[task].fail("straggler", "the group was complete without the episode (rollout.quorum)")
    give_up([playing[task] for task in pending])
