"""Calls of one episode's environment: each with a deadline, plain functions in threads, never two at a time."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)


class EnvTooSlow(Exception):
    """A call did not end before its deadline."""


class EnvCalls:
    """One episode's calls, one after the other. ``timeout_s``: seconds that a call may take."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None  # of the newest plain call

    async def __call__(self, function: Callable[..., Any], *given: Any) -> Any:
        """What ``function`` returns. Raises `EnvTooSlow` past the deadline, and whatever the function raises."""
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                if inspect.iscoroutinefunction(function):
                    return await function(*given)
                return await self._in_thread(function, *given)
        except TimeoutError as error:
            if limit.expired():
                raise EnvTooSlow(f"no answer within {self._timeout_s:g} s") from error
            raise

    async def close(self, function: Callable[[], Any]) -> None:
        """Calls the env's ``close``. Where a plain call was left behind, that is done when the call has ended, and
        nobody waits for it. What the env raises is logged."""
        left = self._thread
        if left is not None and left.is_alive() and not inspect.iscoroutinefunction(function):

            def close_later() -> None:
                left.join()
                function()

            threading.Thread(target=close_later, daemon=True, name="env close").start()
            return
        try:
            await self(function)
        except Exception as error:  # foreign code: the episode is over, and its result stands
            log.warning("an env did not close: %s: %s", type(error).__name__, error)

    async def _in_thread(self, function: Callable[..., Any], *given: Any) -> Any:
        """What ``function`` returns, from a thread of its own. One that hangs holds up neither other episodes nor the
        end of the process, as one in a pool of threads would."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if future.done():  # nobody waits any more
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def work() -> None:
            result: Any = None
            failure: Exception | None = None
            try:
                result = function(*given)
            except StopIteration as error:  # which no future takes
                failure = RuntimeError(f"StopIteration: {error}")
            except Exception as error:  # crosses to the caller, who raises it
                failure = error
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, result, failure)

        self._thread = threading.Thread(target=work, daemon=True, name="env")
        self._thread.start()
        return await future
