"""Runs slow calls in threads with one queue per key: a slow call delays only later calls for the same key."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class CallQueues:
    """Runs calls with the same key, such as an engine's URL, one after the other in the order of `put`.

    Calls with different keys run at the same time. The threads are daemons, so a hanging call does not keep the process
    alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # A key has an entry while its thread runs.

    def put(self, key: str, call: Callable[[], T]) -> Future[T]:
        """Queues ``call`` and returns at once; the returned future gets the call's result or exception."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:  # The future raises the exception when its result is read.
                future.set_exception(error)

        with self._lock:
            if key in self._waiting:
                self._waiting[key].append(run)
                return future
            self._waiting[key] = deque([run])
        threading.Thread(target=self._work, args=(key,), name=f"calls {key}", daemon=True).start()
        return future

    def _work(self, key: str) -> None:
        while (call := self._next(key)) is not None:
            call()

    def _next(self, key: str) -> Callable[[], Any] | None:
        with self._lock:
            if self._waiting[key]:
                return self._waiting[key].popleft()
            del self._waiting[key]
            return None
