"""Controls one worker process of an isolated env: makes calls, tracks episodes, and checks memory."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import TypeVar

import msgspec
import psutil

from relax_core.config.redaction import packed_text
from relax_core.contracts.child_process import ChildLost, WorkerProcess
from relax_core.contracts.env import IsolatedConfig
from relax_core.contracts.plugin_results import WrongResult
from relax_core.rollout.env_workers.env_messages import Close, EnvAnswer, EnvRequest, Failed, Open, Settings
from relax_core.rollout.episodes.env_calls import EnvTooSlow

_MAIN = "relax_core.rollout.env_workers.env_worker_main"
_GIB = 2**30
log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class EnvFailed(Exception):
    """Reports that the env raised an exception in its worker process, or that the process was lost."""


class EnvWorker:
    """Controls one worker process. The process makes one call at a time; further calls wait in order.

    The time limit of a call begins when the process starts the call. ``open_episodes`` is the number of episodes that
    are assigned to this process.
    """

    def __init__(self, env: str, config: IsolatedConfig, *, log: int) -> None:
        settings = Settings(env=env, config=msgspec.msgpack.encode(config, enc_hook=packed_text))
        self.open_episodes = 0
        self._config = config
        self._process = WorkerProcess([_MAIN, env], settings, name=f"env {config.name}", log=log)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="env worker")
        self._numbers = count()
        self._began: dict[int, int] = {}  # open episode → the number of lost processes when the episode began
        self._processes = 0  # the number of lost processes
        self._lost = ""  # why the newest lost process was lost
        self._over_memory = ""  # why the current process was killed, else empty

    def next_episode(self) -> int:
        """Returns a new number for an episode of this worker."""
        return next(self._numbers)

    async def ask(self, request: EnvRequest, kind: type[Answer]) -> Answer:
        """Sends a request, and returns the answer of type ``kind``.

        Raises `EnvTooSlow` if the call takes longer than ``config.step_timeout_s``, `WrongResult` if the env broke its
        contract, and `EnvFailed` if the env raised an exception, or if the process where the episode began was lost.
        """
        answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, request)
        assert isinstance(answer, kind), f"{type(answer).__name__} answers {type(request).__name__}"
        return answer

    def close_episode(self, episode: int) -> None:
        """Closes an episode's env after its earlier calls, and logs the env's errors; returns at once."""

        def close() -> None:
            if self._began.pop(episode, None) != self._processes:
                return  # the env was not opened, or its process was lost
            try:
                self._exchange(Close(episode=episode))
            except (EnvFailed, EnvTooSlow, WrongResult) as error:  # the episode has ended and keeps its result
                log.warning("an env did not close: %s", error)

        with suppress(RuntimeError):  # after `stop`
            self._thread.submit(close)

    def _ask(self, request: EnvRequest) -> EnvAnswer:
        if self._over_memory:  # the process was killed between two calls
            self._note_loss(self._over_memory)
            self._process.replace()
        if isinstance(request, Open):
            self._began[request.episode] = self._processes
        elif self._began[request.episode] != self._processes:
            raise EnvFailed(f"its worker process was replaced: {self._lost}")
        return self._exchange(request)

    def _exchange(self, request: EnvRequest) -> EnvAnswer:
        try:
            packed = self._process.ask(request, limit_s=self._config.step_timeout_s)
        except ChildLost as error:
            self._note_loss(self._over_memory or str(error))
            if error.late:
                raise EnvTooSlow(str(error)) from error
            raise EnvFailed(self._lost) from error
        answer: EnvAnswer = msgspec.msgpack.decode(packed, type=EnvAnswer)
        if isinstance(answer, Failed):
            raise (WrongResult if answer.wrong_result else EnvFailed)(answer.message)
        return answer

    def _note_loss(self, why: str) -> None:
        self._processes += 1
        self._lost, self._over_memory = why, ""

    def check_memory(self) -> None:
        """Kills the process if the process and its children use more than ``config.worker_memory_gib`` GiB."""
        used = memory_bytes(self._process.pid)
        if used > self._config.worker_memory_gib * _GIB and not self._over_memory:
            self._over_memory = (
                f"its worker process used {used / _GIB:.2f} GiB, more than "
                f"the {self._config.worker_memory_gib:g} GiB that it may have"
            )
            self._process.kill()

    def stop(self) -> None:
        """Kills the process; no new process is started."""
        self._process.stop()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._process.close_pipes()


def memory_bytes(pid: int) -> int:
    """Returns the resident memory of a process and its children in bytes; 0 if the process has ended."""
    used = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                used += member.memory_info().rss
    return used
