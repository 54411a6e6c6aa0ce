"""Polls every worker for its status without waiting for a worker that does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from relax_core.control.host.process_trees import LONGEST_GAP_S
from relax_core.roles.process.worker import WorkerStatus

Life = Literal["starting", "alive", "restarting", "dead"]  # Ray's names for the states of an actor


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Holds the state of a worker's process.

    ``status`` is its newest answer, which a process that has exited may have given.

    ``silent_s`` counts the seconds without an answer of a process that has answered before. ``cause`` says how the
    process died.
    """

    name: str
    life: Life
    status: WorkerStatus | None
    silent_s: float = 0.0
    cause: str = ""


class Heartbeats:
    """Sends one status call at a time to each worker.

    ``clock`` returns monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._polled: float | None = None
        self._asked: dict[str, Any] = {}
        self._beats: dict[str, Beat] = {}

    def poll(self, workers: Mapping[str, Any], *, timeout_s: float) -> dict[str, Beat]:
        """Calls ``workers`` (name → handle) and returns their states after at most ``timeout_s`` seconds.

        A worker that is no longer among them is forgotten.
        """
        for name in self._beats.keys() - workers.keys():
            del self._beats[name]
            self._asked.pop(name, None)
        for name, worker in workers.items():
            if name not in self._asked:
                self._asked[name] = worker.status.remote()
        ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=timeout_s)
        now = self._clock()
        passed = 0.0 if self._polled is None else min(now - self._polled, LONGEST_GAP_S)
        self._polled = now
        for name in workers:
            self._beats[name] = self._take(name, passed)
        return dict(self._beats)

    def _take(self, name: str, passed: float) -> Beat:
        last = self._beats.get(name, Beat(name=name, life="starting", status=None))
        try:
            status: WorkerStatus = ray.get(self._asked[name], timeout=0)
            beat = Beat(name=name, life="alive", status=status)
        except GetTimeoutError:
            silent_s = last.silent_s + passed if last.life == "alive" else 0.0
            return Beat(name=name, life=last.life, status=last.status, silent_s=silent_s)
        except ActorUnavailableError:
            beat = Beat(name=name, life="restarting", status=last.status)
        except ActorDiedError as error:
            beat = Beat(name=name, life="dead", status=last.status, cause=str(error))
        del self._asked[name]
        return beat
