"""Runs the episodes of an isolated env in worker processes; a process that hangs or dies is replaced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from relax_core.contracts.child_process import LimitedLog
from relax_core.contracts.env import (
    Action,
    BaseInteractionEnv,
    EnvSpec,
    EpisodeStart,
    IsolatedConfig,
    Message,
    StepResult,
)
from relax_core.rollout.env_workers.env_messages import Open, Opened, Step, Stepped, with_sources
from relax_core.rollout.env_workers.env_worker import EnvWorker
from relax_core.rollout.episodes.env_calls import keeps_deadline

MEMORY_CHECK_S = 1.0
_LOG_BYTES = 16 * 2**20
_END_S = 10.0


@dataclass(eq=False)
class _Places:
    """Counts the places of a group: ``kept`` places are reserved for the group, ``open`` episodes use such a place."""

    kept: int
    open: int = 0


class EnvWorkers:
    """Holds ``config.workers`` worker processes with ``config.episodes_per_worker`` places per process.

    A place is room for one open episode. A group gets places for all of its episodes at once. Otherwise two groups
    could wait for each other. The object must be used by one event loop. The output of the processes goes to
    ``log_file``.
    """

    def __init__(self, spec: EnvSpec, config: IsolatedConfig, *, log_file: Path | None = None) -> None:
        assert spec.isolated
        self._spec = spec
        self._log = LimitedLog(log_file, max_bytes=_LOG_BYTES)
        self.workers = [EnvWorker(config.name, config, log=self._log.descriptor) for _ in range(config.workers)]
        self._free = config.workers * config.episodes_per_worker
        self._groups: dict[int, _Places] = {}
        self._changed = asyncio.Condition()
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._check_memory, daemon=True, name="memory of env workers")
        self._watch.start()

    def spec(self, *, episodes_per_group: int) -> EnvSpec:
        """Returns the env for groups of this size; the env opens its episodes in the worker processes."""

        @keeps_deadline
        async def open_episode(start: EpisodeStart, config: Any) -> BaseInteractionEnv:
            await self._take_place(start.group_seed, episodes_per_group)
            worker = min(self.workers, key=lambda worker: worker.open_episodes)
            worker.open_episodes += 1
            return IsolatedEnv(start, worker, give_back=lambda: self._give_place(start.group_seed))

        return replace(self._spec, open=cast(Any, open_episode))

    async def _take_place(self, group: int, size: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: group in self._groups or self._free >= size)
            if group not in self._groups:
                self._groups[group] = _Places(kept=size)
                self._free -= size
            self._groups[group].open += 1

    async def _give_place(self, group: int) -> None:
        async with self._changed:
            places = self._groups[group]
            places.open -= 1
            if not places.open:
                self._free += places.kept
                del self._groups[group]
                self._changed.notify_all()

    def _check_memory(self) -> None:
        while not self._ended.wait(MEMORY_CHECK_S):
            for worker in self.workers:
                worker.check_memory()

    def close(self) -> None:
        """Kills the worker processes with all of their children."""
        self._ended.set()
        self._watch.join(_END_S)
        for worker in self.workers:
            worker.stop()
        self._log.close()


class IsolatedEnv(BaseInteractionEnv):
    """Forwards the calls of one episode's env to a worker process. The process returns observations as messages.

    A call that takes too long raises `EnvTooSlow`, and a call that fails raises `EnvFailed`. If the worker process is
    replaced, all later calls of the episode fail.
    """

    def __init__(self, start: EpisodeStart, worker: EnvWorker, *, give_back: Callable[[], Awaitable[None]]) -> None:
        self._start = start
        self._worker = worker
        self._give_back = give_back
        self._episode = worker.next_episode()

    @keeps_deadline
    async def reset(self) -> list[Message]:
        """Opens the env in the worker process and returns its opening messages."""
        answer = await self._worker.ask(Open(episode=self._episode, start=self._start), Opened)
        return [with_sources(message) for message in answer.messages]

    @keeps_deadline
    async def step(self, action: Action) -> StepResult:
        """Returns the env's answer to a response; its observation is a list of messages."""
        answer = await self._worker.ask(Step(episode=self._episode, action=action), Stepped)
        return StepResult(
            observation=None if answer.messages is None else [with_sources(message) for message in answer.messages],
            reward=answer.reward,
            done=answer.done,
            info=answer.info,
            state_key=answer.state_key,
            context_edit=None
            if answer.context_edit is None
            else [with_sources(message) for message in answer.context_edit],
        )

    @keeps_deadline
    async def close(self) -> None:
        """Requests that the worker process closes the env after the earlier calls, and returns at once."""
        self._worker.open_episodes -= 1
        self._worker.close_episode(self._episode)
        await self._give_back()
