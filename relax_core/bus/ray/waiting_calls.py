"""Calls that wait inside the bus process. Each is woken only when it can proceed, fails, or its deadline passes."""

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


class WaitingRoom:
    """All waiting calls, first come first served. Belongs to one event loop."""

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
        """Returns what ``attempt`` gives as soon as it is not None; it is tried now and after each `wake`.

        After ``timeout_s`` raises `BusTimeout` with ``explain(timeout_s)``. ``task``, ``worker``: whom `fail_task`
        reaches, and under which name `waits` has it, with ``owed_by``.
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
        """Something changed: whoever can proceed now does."""
        for waiter in list(self._waiters):
            try:
                result = waiter.attempt()
            except (ValueError, RuntimeError) as error:
                self._finish(waiter, error=error)
                continue
            if result is not None:
                self._finish(waiter, result=result)

    def fail_task(self, task: str, error: Exception, *, worker: int = 0) -> None:
        """Ends the waits of a task's worker that was lost."""
        for waiter in [waiter for waiter in self._waiters if (waiter.task, waiter.worker) == (task, worker)]:
            self._finish(waiter, error=error)

    def fail_all(self, error: Exception) -> None:
        """Ends every wait."""
        for waiter in list(self._waiters):
            self._finish(waiter, error=error)

    def waits(self) -> list[BusWait]:
        """The waits that belong to a task, the longest first."""
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
        if waiter in self._waiters:  # else it was woken in this very turn of the loop
            self._finish(waiter, error=BusTimeout(waiter.explain(waiter.timeout_s)))

    def _finish(self, waiter: _Waiter, *, result: Any = None, error: Exception | None = None) -> None:
        """Ends a wait; it leaves the room at once, so that it cannot be ended twice."""
        del self._waiters[waiter]
        if error is not None:
            waiter.future.set_exception(error)
        else:
            waiter.future.set_result(result)
