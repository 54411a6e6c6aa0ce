"""The calls that wait inside the bus process, and the texts that say what each waits for and which task has to act.

A call is woken only if it can proceed, fails, or its deadline passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from relax_core.bus.call_checks import ACTOR
from relax_core.bus.open_groups import HeldLease, OpenGroup
from relax_core.bus.replay_buffer import BusCore
from relax_core.contracts import columns as c
from relax_core.contracts.bus import BusTimeout, BusWait, LeaseRequest

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


WRITERS = {  # the task that writes each column that the rollout does not write
    c.OLD_LOGPROBS: "actor_fwd",
    c.REFERENCE_LOGPROBS: "reference",
    c.ADVANTAGES: "advantages",
    c.RETURNS: "advantages",
    c.VALUES: "critic",
    c.TEACHER_LOGPROBS: "teacher",
    c.TEACHER_TOP_IDS: "teacher",
    c.TEACHER_TOP_LOGPROBS: "teacher",
}
ROLLOUT = "rollout"  # the task name of calls that wait for admissions


def explain_admit(core: BusCore, worker: int, *, waited_s: float) -> str:
    """Returns a text such as "rollout waits for credit for 30.0 s at version 3: 16 groups are outstanding: …"."""
    if core.room_of(worker) <= 0:
        return f"{ROLLOUT}-{worker} has its part of the groups in flight for {waited_s:.1f} s at version {core.version}"
    head = f"rollout waits for credit for {waited_s:.1f} s at version {core.version}"
    if not core.groups:
        return f"{head}: no group is outstanding"
    parts = [
        *_in_flight(core, [group for group in core.groups.values() if group.in_flight]),
        *_count(sum(not g.in_flight and g.actor_step is None for g in core.groups.values()), "waiting in the bus"),
        *_leases(core, ACTOR),
    ]
    owes = f"actor owes the ack of step {core.version}"
    return f"{head}: {len(core.groups)} groups are outstanding: {', '.join(parts)}; {owes}"


def explain_lease(core: BusCore, request: LeaseRequest, *, waited_s: float) -> str:
    """Returns a text such as "actor waits for 8 groups at step 12 for 30.0 s: 3 in flight in rollout (…), …"."""
    at_step = f" at step {request.step}" if request.task == ACTOR else ""
    groups = "group" if request.min_groups == 1 else "groups"
    head = f"{request.task} waits for {request.min_groups} {groups}{at_step} for {waited_s:.1f} s"
    if request.task == ACTOR and request.step != core.version:
        return f"{head}: version {core.version} is in force, actor owes the ack of step {core.version}"
    free = [group for group in core.groups.values() if group.actor_step is None]
    undone = [group for group in free if request.task not in group.done and request.task not in group.leases]
    here = [group for group in undone if not group.in_flight]
    ready = sum(group.has_columns(request.columns) for group in here)
    parts = [
        *_in_flight(core, [group for group in free if group.in_flight]),
        *_lacking(here, request.columns),
        *_leases(core, request.task),
        *_count(ready, "ready"),
    ]
    return f"{head}: {', '.join(parts) if parts else 'rollout has no group in flight and owes new ones'}"


def admit_owed_by(core: BusCore, worker: int) -> list[str]:
    """Returns the tasks that have to act before this rollout worker gets an admission.

    The trainer's ack frees credits. If the worker has its limit of groups in flight, only the worker itself can act.
    """
    return [ACTOR] if core.room_of(worker) > 0 else []


def lease_owed_by(core: BusCore, request: LeaseRequest) -> list[str]:
    """Returns the tasks that have to act before this lease can be given, with each rollout worker as "rollout-1"."""
    if request.task == ACTOR and request.step != core.version:
        return [ACTOR]
    waiting = [g for g in core.groups.values() if g.actor_step is None and not g.in_flight]
    lacking = {column for group in waiting for column in request.columns if not group.has_columns((column,))}
    writers = sorted({WRITERS.get(column, ROLLOUT) for column in lacking} - {request.task})
    sampled = [g for g in core.groups.values() if g.in_flight and g.admission.min_version <= core.version]
    workers = [f"{ROLLOUT}-{worker}" for worker in sorted({group.worker for group in sampled})]
    return [*(workers or ([] if writers else [ROLLOUT])), *writers]


def _in_flight(core: BusCore, groups: list[OpenGroup]) -> list[str]:
    if not groups:
        return []
    oldest = groups[0]
    held = sum(group.admission.min_version > core.version for group in groups)
    early = f", {held} of them held for a later version" if held else ""
    age = core.clock() - oldest.admitted_at
    where = f"{ROLLOUT}-{oldest.worker}, " if any(group.worker for group in groups) else ""
    details = f"oldest {oldest.admission.group_uid}, {where}admitted {age:.0f} s ago{early}"
    return [f"{len(groups)} in flight in rollout ({details})"]


def _lacking(groups: list[OpenGroup], columns: tuple[str, ...]) -> list[str]:
    lacking: dict[str, list[str]] = {}
    for group in groups:
        for column in columns:
            if not group.has_columns((column,)):
                lacking.setdefault(column, []).append(group.admission.group_uid)
    return [f"{len(uids)} lack column {column} (first {uids[0]})" for column, uids in sorted(lacking.items())]


def _leases(core: BusCore, task: str) -> list[str]:
    return [_describe(core, lease) for lease in core.leases.of_task(task)]


def _describe(core: BusCore, lease: HeldLease) -> str:
    step = f" for step {lease.step}" if lease.step is not None else ""
    age = core.clock() - lease.leased_at
    return f"{len(lease.group_uids)} leased by {lease.task}{step} (lease {lease.lease_id}, {age:.0f} s ago)"


def _count(count: int, what: str) -> list[str]:
    return [f"{count} {what}"] if count else []
