"""Makes the calls of one episode's environment, each with a deadline; plain functions run in threads."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from relax_core.contracts.env import BaseInteractionEnv

log = logging.getLogger(__name__)
AsyncCall = TypeVar("AsyncCall", bound=Callable[..., Awaitable[Any]])


def keeps_deadline(function: AsyncCall) -> AsyncCall:
    """Marks an async function that enforces its deadline itself and raises `EnvTooSlow`."""
    function.keeps_deadline = True  # type: ignore[attr-defined]
    return function


class EnvTooSlow(Exception):
    """Reports that a call of the environment did not end before its deadline."""


class EnvCalls:
    """Makes the calls of one episode, one at a time; ``timeout_s`` is the time limit of a call in seconds.

    A function with the attribute ``keeps_deadline`` raises `EnvTooSlow` itself. This is for calls of an env worker: a
    call may wait for earlier calls, and its time begins after this wait.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None  # the thread of the newest call of a plain function
        self._closing: asyncio.Task[None] | None = None  # closes an env that opened too late

    async def __call__(self, function: Callable[..., Any], *given: Any) -> Any:
        """Returns the result of ``function``. Raises its exceptions, and `EnvTooSlow` after the deadline.

        A plain function may return an env after the deadline or after the call was cancelled; this env is closed.
        """
        if getattr(function, "keeps_deadline", False):
            return await function(*given)
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
        """Calls the env's ``close`` and logs its exceptions.

        If a call of a plain function still runs after its deadline, this method returns at once, and a thread closes
        the env when the call ends.
        """
        running = self._thread
        if running is not None and running.is_alive() and not inspect.iscoroutinefunction(function):

            def close_later() -> None:
                running.join()
                function()

            threading.Thread(target=close_later, daemon=True, name="env close").start()
            return
        try:
            await self(function)
        except Exception as error:  # plug-in code: the episode has ended and keeps its result
            log.warning("an env did not close: %s: %s", type(error).__name__, error)

    async def _in_thread(self, function: Callable[..., Any], *given: Any) -> Any:
        """Runs ``function`` in a new thread, and returns its result.

        Because of the new thread, a call that hangs does not delay other episodes or the end of the process. In a
        thread pool it would delay them.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if future.done():  # the caller has stopped waiting
                if isinstance(result, BaseInteractionEnv):  # no caller receives this env, so it is closed here
                    self._closing = loop.create_task(self.close(result.close))
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
            except StopIteration as error:  # a future does not accept a StopIteration
                failure = RuntimeError(f"StopIteration: {error}")
            except Exception as error:  # the future raises the error in the caller
                failure = error
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(settle, result, failure)

        self._thread = threading.Thread(target=work, daemon=True, name="env")
        self._thread.start()
        return await future
