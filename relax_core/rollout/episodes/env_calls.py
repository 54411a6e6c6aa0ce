"""Calls of one episode's environment, each with a deadline; plain functions run in threads, one call at a time."""

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
    """A call of the environment did not end before its deadline."""


class EnvCalls:
    """Makes the calls of one episode, one after the other; ``timeout_s`` is the limit of a call in seconds.

    A function with the attribute ``keeps_deadline`` raises `EnvTooSlow` itself: a call of an env worker may wait for
    its turn, and its time begins after that.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None  # the thread of the newest call of a plain function
        self._closing: asyncio.Task[None] | None = None  # closes an env that opened too late

    async def __call__(self, function: Callable[..., Any], *given: Any) -> Any:
        """Returns the result of ``function``. Raises its exceptions, and `EnvTooSlow` after the deadline.

        An env that a plain function returns after the deadline, or after the call was cancelled, is closed.
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

        If a call of a plain function is still running after its deadline, a thread closes the env when that call ends,
        and this method returns at once.
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
        """Returns the result of ``function``, which runs in a new thread.

        A call that hangs therefore delays neither other episodes nor the end of the process; with a thread pool
        it would.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if future.done():  # the caller has stopped waiting
                if isinstance(result, BaseInteractionEnv):  # no caller has it, so it is closed here
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
            except Exception as error:  # the future carries it to the caller, which raises it
                failure = error
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(settle, result, failure)

        self._thread = threading.Thread(target=work, daemon=True, name="env")
        self._thread.start()
        return await future
