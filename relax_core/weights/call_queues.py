"""Runs slow calls in threads with one queue per key, so that a slow call delays only calls for the same key."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class CallQueues:
    """Runs the calls for one key, such as an engine's URL, in the order of `put`.

    Calls for different keys run at the same time. The threads are daemons, so a call that hangs keeps no process alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # A key is present while its thread runs.

    def put(self, key: str, call: Callable[[], T]) -> Future[T]:
        """Queues ``call`` and returns at once; the future gets the result or the exception."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:  # The reader of the result gets every exception.
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
