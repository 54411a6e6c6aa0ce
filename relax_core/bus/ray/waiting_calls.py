"""Calls that wait inside the bus process. A call is woken only if it can proceed, fails, or its deadline passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from relax_core.contracts.bus import BusTimeout, BusWait

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    attempt: Callable[[], Any | None]
    explain: Callable[[float], str]
    owed_by: Callable[[], list[str]]
    timeout_s: float
    since: float  # on the event loop's clock
    task: str | None
    worker: int
    future: asyncio.Future[Any]


class WaitingCalls:
    """Is all waiting calls, served in the order in which they came. They belong to one event loop."""

    def __init__(self) -> None:
        self._waiters: dict[_Waiter, None] = {}

    async def wait(
        self,
        attempt: Callable[[], T | None],
        *,
        explain: Callable[[float], str],
        timeout_s: float,
        owed_by: Callable[[], list[str]] = list,
        task: str | None = None,
        worker: int = 0,
    ) -> T:
        """Returns the value of ``attempt`` as soon as it is not None; it is tried now and after each `wake`.

        After ``timeout_s`` seconds it raises `BusTimeout` with the text ``explain(timeout_s)``. `fail_task` ends the
        calls of a ``task`` and ``worker``, and `waits` reports them with ``owed_by``.
        """
        result = attempt()
        if result is not None:
            return result
        loop = asyncio.get_running_loop()
        waiter = _Waiter(
            attempt=attempt,
            explain=explain,
            owed_by=owed_by,
            timeout_s=timeout_s,
            since=loop.time(),
            task=task,
            worker=worker,
            future=loop.create_future(),
        )
        self._waiters[waiter] = None
        deadline = loop.call_later(timeout_s, self._time_out, waiter)
        try:
            return await waiter.future
        finally:
            deadline.cancel()
            self._waiters.pop(waiter, None)

    def wake(self) -> None:
        """Tries every waiting call again, because the state has changed."""
        for waiter in list(self._waiters):
            try:
                result = waiter.attempt()
            except (ValueError, RuntimeError) as error:
                self._finish(waiter, error=error)
                continue
            if result is not None:
                self._finish(waiter, result=result)

    def fail_task(self, task: str, error: Exception, *, worker: int = 0) -> None:
        """Ends the waits of a task's worker that was lost, with ``error``."""
        for waiter in [waiter for waiter in self._waiters if (waiter.task, waiter.worker) == (task, worker)]:
            self._finish(waiter, error=error)

    def fail_all(self, error: Exception) -> None:
        """Ends every wait with ``error``."""
        for waiter in list(self._waiters):
            self._finish(waiter, error=error)

    def waits(self) -> list[BusWait]:
        """Returns the waits that belong to a task, the longest first."""
        now = asyncio.get_running_loop().time()
        return [
            BusWait(
                task=waiter.task,
                since_s=now - waiter.since,
                text=waiter.explain(now - waiter.since),
                owed_by=waiter.owed_by(),
                worker=waiter.worker,
            )
            for waiter in self._waiters
            if waiter.task is not None
        ]

    def _time_out(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:  # else it was woken in the same turn of the event loop
            self._finish(waiter, error=BusTimeout(waiter.explain(waiter.timeout_s)))

    def _finish(self, waiter: _Waiter, *, result: Any = None, error: Exception | None = None) -> None:
        """Ends a wait and removes it at once, so that it cannot end twice."""
        del self._waiters[waiter]
        if error is not None:
            waiter.future.set_exception(error)
        else:
            waiter.future.set_result(result)
