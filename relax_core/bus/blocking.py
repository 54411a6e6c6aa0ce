"""Calls of the bus for threads without an event loop: the thread waits until it has the answer."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _ThreadLoop:
    """Holds the event loop of one thread; it is closed when the thread ends, and the main thread's with the process."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        closing = weakref.finalize(self, self.runner.close)
        # At the end of the process another thread may still be in a call, and no other thread may close its loop.
        closing.atexit = threading.current_thread() is threading.main_thread()


_thread = threading.local()


def blocking(call: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``call``, or raises its error; the thread must not be in an event loop already.

    All calls of a thread share one event loop, because a new one takes longer than most calls of the bus.
    """
    held: _ThreadLoop | None = getattr(_thread, "loop", None)
    if held is None:
        held = _thread.loop = _ThreadLoop()
    return held.runner.run(call, context=contextvars.copy_context())
