"""Polls the heartbeats of all workers once a second, and restarts dead or frozen workers in place."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from relax_core.bus.ray_bus import ANSWER_GRACE_S, PROCESS_EXITED, RayBus, blocking
from relax_core.contracts.bus import BusLost, BusProgress, BusTimeout
from relax_core.contracts.monitor import Check, Elapsed, Finding
from relax_core.contracts.process_trees import EXITED, OwnedProcesses, process_state
from relax_core.control.recoveries import IN_PLACE, Recoveries, RunFailed, ServicesLost
from relax_core.observe.panel import RoleState, RoleStateName
from relax_core.roles.worker import WorkerStatus, process_host

POLL_S = 0.2  # timeout in seconds of the answers, which normally take milliseconds


class KillableServices(Protocol):
    """Declares the part of the services that `WorkerHealth` uses."""

    def handles(self) -> Mapping[str, Any]:
        """Returns the Ray handles of all workers, by worker name."""

    def dispensable(self) -> Collection[str]:
        """Returns the workers that may end without a failure of the run."""

    def kill_frozen(self, name: str, status: WorkerStatus) -> None:
        """Kills a worker that does not answer."""


@dataclass(kw_only=True)
class _Restarts:
    """Holds the restarts of one worker.

    ``count`` is the number of recorded restarts. ``under_way`` says that a restart is in progress. ``killed`` is the
    reason why the process ``killed_pid`` was killed at the monotonic time ``killed_at``; it becomes "" when the restart
    is recorded.
    """

    count: int = 0
    under_way: bool = False
    killed: str = ""
    killed_at: float | None = None
    killed_pid: int | None = None


class WorkerHealth:
    """Monitors the workers of one attempt of the services.

    A worker that has answered before and then does not answer for ``heartbeat_timeout_s`` seconds is frozen: it was
    stopped, or its interpreter hangs. It is killed, and Ray restarts it. If a process has no first answer within
    ``start_timeout_s`` seconds, all services restart, because without an answer the controller does not know the
    process id. If a worker on this machine has exited, its child processes, such as an engine, are killed, because they
    may be frozen, too.
    """

    def __init__(
        self,
        services: KillableServices,
        recoveries: Recoveries,
        *,
        heartbeat_timeout_s: float,
        start_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._services = services
        self._recoveries = recoveries
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._start_timeout_s = start_timeout_s
        self._heartbeats = Heartbeats(clock=clock)
        self._watch = RoleWatch()
        self._restarts: defaultdict[str, _Restarts] = defaultdict(_Restarts)  # by worker
        self._suspicious = False
        self._owned = OwnedProcesses()
        self.beats: dict[str, WorkerHeartbeat] = {}
        self.roles: list[RoleState] = []
        self.ended: dict[str, str] = {}  # dispensable worker that has ended → reason

    def check(self, *, bus_lost: str | None, step: int) -> None:
        """Polls the workers and kills frozen workers.

        ``step`` is the number of train steps done.

        Raises `ServicesLost` if all services have to restart, and `RunFailed` for an error that a role's code raised.
        """
        before = self.beats
        self.beats = self._heartbeats.poll(self._services.handles(), timeout_s=POLL_S)
        for name in before.keys() - self.beats.keys():
            self._forget(name)
        self.roles = self._watch.roles(self.beats)
        for beat in self.beats.values():
            status = beat.alive
            if status is not None and status.child_pids and status.host == process_host():
                self._owned.record(beat.name, status.pid, status.child_pids)
        self._owned.end_adopted_processes()
        for beat in self.beats.values():
            if beat.alive is not None and beat.silent_s > self._heartbeat_timeout_s:
                self._kill_frozen(beat, beat.alive)
        dispensable = self._services.dispensable()
        self.ended = {name: why for name in dispensable if name in self.beats and (why := ended(self.beats[name]))}
        needed = {name: beat for name, beat in self.beats.items() if name not in dispensable}
        killed = {name: restart.killed for name, restart in self._restarts.items() if restart.killed}
        failure = verdict(needed, bus=bus_lost, killed=killed, sure=self._suspicious)
        if failure is not None:
            raise failure
        for beat in needed.values():
            if beat.alive is None and beat.silent_s > self._start_timeout_s:
                raise ServicesLost(
                    f"{beat.name} did not answer within run.start_timeout_s={self._start_timeout_s:g} s of its "
                    f"{'restart' if beat.life == 'restarting' else 'start'}"
                )
        self._suspicious = any(role.state == "failed" and role.name in needed for role in self.roles)
        self._record_restarts(step)

    def done(self, name: str) -> bool:
        """Returns whether this worker has completed its part of the run."""
        beat = self.beats.get(name)
        return beat is not None and beat.status is not None and beat.status.state == "done"

    def progress(self, name: str) -> int:
        """Returns this worker's progress in a long operation (`WorkerStatus.progress`)."""
        beat = self.beats.get(name)
        return beat.status.progress if beat is not None and beat.status is not None else 0

    def _forget(self, name: str) -> None:
        """Forgets a worker that has left the run, and kills its processes."""
        self._owned.forget(name)
        self._watch.forget(name)
        self._restarts.pop(name, None)

    def _kill_frozen(self, beat: WorkerHeartbeat, status: WorkerStatus) -> None:
        here = status.host == process_host()
        state = process_state(status.pid) if here else "on another host"
        known = self._restarts[beat.name]
        if known.killed_pid == status.pid or state in EXITED:  # Ray has not noticed the end of the process yet
            return
        known.killed_pid, known.killed_at = status.pid, time.monotonic()
        known.killed = f"froze (no answer for {beat.silent_s:.0f} s, state {state}) and was killed by SIGKILL"
        self._services.kill_frozen(beat.name, status)

    def _record_restarts(self, step: int) -> None:
        """Records each restart once: while a worker is restarting, or after its process id or restart count changed."""
        for role in self.roles:
            known = self._restarts[role.name]
            more = role.restarts > known.count
            if (role.state == "restarting" or more) and not known.under_way:
                cause = f"{role.name} {known.killed or self._own_process(role.name) or 'died'}"
                noticed, known.killed, known.killed_at = known.killed_at, "", None
                self._recoveries.begin(IN_PLACE, cause, at_step=step, from_step=step, noticed=noticed)
            if role.state == "restarting":
                known.under_way = True
            elif more:
                known.under_way = False
            known.count = role.restarts

    def _own_process(self, name: str) -> str:
        """Returns how a worker's child process, such as an engine, ended before the worker restarted it, or ""."""
        status = self.beats[name].alive
        return "" if status is None else status.last_restart


# -- Polls every worker for its status, without waiting for workers that do not answer --------------------------------

Life = Literal["starting", "alive", "restarting", "dead"]  # Ray's names for the states of an actor


@dataclass(frozen=True, kw_only=True)
class WorkerHeartbeat:
    """Holds the state of a worker's process.

    ``status`` is the worker's newest answer, possibly of a process that has exited. ``silent_s`` is the time in seconds
    since the last answer, or since the start. ``cause`` says how the process died.
    """

    name: str
    life: Life
    status: WorkerStatus | None
    silent_s: float = 0.0
    cause: str = ""

    @property
    def alive(self) -> WorkerStatus | None:
        """Returns the newest answer if the process is alive, else None."""
        return self.status if self.life == "alive" else None


class Heartbeats:
    """Sends one status call at a time to each worker.

    ``clock`` returns monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._elapsed = Elapsed(clock)
        self._asked: dict[str, Any] = {}
        self._beats: dict[str, WorkerHeartbeat] = {}

    def poll(self, workers: Mapping[str, Any], *, timeout_s: float) -> dict[str, WorkerHeartbeat]:
        """Calls ``workers`` (name → handle) and returns their states after at most ``timeout_s`` seconds.

        Forgets workers that are no longer in ``workers``.
        """
        for name in self._beats.keys() - workers.keys():
            del self._beats[name]
            self._asked.pop(name, None)
        for name, worker in workers.items():
            if name not in self._asked:
                self._asked[name] = worker.status.remote()
        ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=timeout_s)
        passed = self._elapsed.since_last()
        for name in workers:
            self._beats[name] = self._take(name, passed)
        return dict(self._beats)

    def _take(self, name: str, passed: float) -> WorkerHeartbeat:
        last = self._beats.get(name, WorkerHeartbeat(name=name, life="starting", status=None))
        try:
            status: WorkerStatus = ray.get(self._asked[name], timeout=0)
            beat = WorkerHeartbeat(name=name, life="alive", status=status)
        except GetTimeoutError:
            return WorkerHeartbeat(name=name, life=last.life, status=last.status, silent_s=last.silent_s + passed)
        except ActorUnavailableError:
            silent_s = last.silent_s + passed if last.life == "restarting" else 0.0
            beat = WorkerHeartbeat(name=name, life="restarting", status=last.status, silent_s=silent_s)
        except ActorDiedError as error:
            beat = WorkerHeartbeat(name=name, life="dead", status=last.status, cause=str(error))
        del self._asked[name]
        return beat


# -- Derives the states for the panel, and the cause that ends an attempt, from the workers' heartbeats ---------------

STATES: Mapping[str, RoleStateName] = {"restarting": "restarting", "dead": "failed", "starting": "starting"}


class RoleWatch:
    """Records each worker's process id to count restarts."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._restarts: dict[str, int] = {}

    def forget(self, name: str) -> None:
        """Forgets a worker that has left the run."""
        self._pids.pop(name, None)
        self._restarts.pop(name, None)

    def roles(self, beats: Mapping[str, WorkerHeartbeat]) -> list[RoleState]:
        """Returns the workers' states for the panel."""
        return [self._role(beat) for beat in beats.values()]

    def _role(self, beat: WorkerHeartbeat) -> RoleState:
        status = beat.alive
        if status is not None:
            if self._pids.setdefault(beat.name, status.pid) != status.pid:
                self._pids[beat.name] = status.pid
                self._restarts[beat.name] = self._restarts.get(beat.name, 0) + 1
            silent = [f"silent for {beat.silent_s:.0f} s"] if beat.silent_s > 1.0 else []
            return RoleState(
                name=beat.name,
                state=status.state,
                since_s=time.time() - status.since,
                restarts=self._restarts.get(beat.name, 0) + status.restarts,
                detail="; ".join([*silent, *([status.detail] if status.detail else [])]),
            )
        return RoleState(
            name=beat.name,
            state=STATES[beat.life],
            since_s=0.0,
            restarts=self._restarts.get(beat.name, 0),
            detail="its process has exited" if beat.life == "dead" else "",
        )


def verdict(
    beats: Mapping[str, WorkerHeartbeat], *, bus: str | None, killed: Mapping[str, str], sure: bool
) -> RunFailed | None:
    """Returns the first cause why these services cannot continue, or None.

    ``bus`` says how the bus was lost. ``killed`` maps frozen workers that were killed to the evidence. A dead process
    is returned before workers that failed because of its death; among failed workers, the worker that failed first is
    returned. An error of a role's code ends the run only if ``sure`` is True. Otherwise the real cause may be the death
    of another process, which is detected shortly after the error.
    """
    if bus is not None:
        return ServicesLost(f"the bus {bus}")
    dead = [beat for beat in beats.values() if beat.life == "dead"]
    if dead:
        names = [beat.name for beat in dead]
        first = next((beat for beat in dead if beat.name in killed), dead[0])
        also = f" (and with it {', '.join(name for name in names if name != first.name)})" if names[1:] else ""
        return ServicesLost(f"{first.name} {killed.get(first.name, 'died')}{also}", log=first.cause)
    failed = sorted((status for beat in beats.values() if (status := _failed(beat))), key=lambda status: status.since)
    if not failed:
        return None
    first_failed = failed[0]
    text = f"{first_failed.name} failed: {first_failed.detail}"
    if first_failed.lost == "bus":
        return ServicesLost("the bus died", log=first_failed.error or "")
    if first_failed.lost is not None:
        return ServicesLost(text, log=first_failed.error or "")
    return RunFailed(text, log=first_failed.error or "", worker=first_failed.name) if sure else None


def ended(beat: WorkerHeartbeat) -> str:
    """Returns why this worker has ended, or "" while it works."""
    if beat.life == "dead":
        return "its process has exited and was restarted too often"
    failed = _failed(beat)
    return "" if failed is None else failed.detail


def _failed(beat: WorkerHeartbeat) -> WorkerStatus | None:
    return beat.alive if beat.alive is not None and beat.alive.state == "failed" else None


# -- Polls the bus in a separate thread, so a hanging bus does not block the controller -------------------------------
ASK_S = 0.25


class BusHealth:
    """Monitors the bus.

    ``progress`` is the bus's newest answer, None before the first answer. ``lost`` says how the bus was lost, as a
    clause for a sentence that begins with "the bus". It is None while the bus answers.
    """

    def __init__(self, bus: RayBus, *, heartbeat_timeout_s: float) -> None:
        self.progress: BusProgress | None = None
        self.lost: str | None = None
        self._bus = bus
        # The bus answers this call immediately, so the deadline includes the client's grace time.
        self._call_timeout_s = max(0.0, heartbeat_timeout_s - ANSWER_GRACE_S)

    def check(self) -> Check:
        """Returns the check of the bus.

        It runs in a separate thread, so a hanging bus does not block the controller.
        """
        return Check(name="bus", every_s=ASK_S, look=self._look, act=self._lose, in_thread=True)

    def _look(self) -> Finding | None:
        try:
            self.progress = blocking(self._bus.progress(timeout_s=self._call_timeout_s))
        except BusLost as error:
            # If another process was lost, such as a storage unit, the error names this process.
            how = "died" if str(error).startswith(PROCESS_EXITED) else f"was lost: {error}"
            return Finding(failed_part="the bus", how=how)
        except BusTimeout as error:
            return Finding(failed_part="the bus", how=f"froze: {error}")
        return None

    def _lose(self, finding: Finding) -> None:
        self.lost = finding.how
