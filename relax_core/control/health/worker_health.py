"""Polls every worker once a second and restarts dead or frozen ones in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from relax_core.control.health.heartbeats import Beat, Heartbeats
from relax_core.control.health.worker_states import RoleWatch, ended, verdict
from relax_core.control.host.process_trees import EXITED, OwnedProcesses, process_state
from relax_core.control.run.recovery_log import IN_PLACE, Recoveries
from relax_core.observe.panel_view import RoleState
from relax_core.roles.process.worker import WorkerStatus, process_host

POLL_S = 0.2  # timeout of the answers, which take milliseconds


class Killable(Protocol):
    """Declares the part of the services that the health manager uses."""

    def handles(self) -> Mapping[str, Any]:
        """Returns the Ray handle of every worker, by its name."""

    def dispensable(self) -> Collection[str]:
        """Returns the workers whose end is no failure of the run."""

    def kill_frozen(self, name: str, status: WorkerStatus) -> None:
        """Kills a worker that does not answer."""


class HealthManager:
    """Watches the workers of one attempt of the services.

    A worker that has answered before and then gives no answer for ``heartbeat_timeout_s`` seconds is frozen: it was
    stopped, or its interpreter hangs. It is killed, so that Ray restarts it. If a worker on this machine has exited,
    the processes that it owned, such as an engine, are killed, because they may be frozen too.
    """

    def __init__(
        self,
        services: Killable,
        recoveries: Recoveries,
        *,
        heartbeat_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._services = services
        self._recoveries = recoveries
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._heartbeats = Heartbeats(clock=clock)
        self._watch = RoleWatch()
        self._restarts: dict[str, int] = {}
        self._restarting: set[str] = set()
        self._killed: dict[str, str] = {}
        self._killed_at: dict[str, float] = {}
        self._killed_pids: dict[str, int] = {}
        self._suspicious = False
        self._owned = OwnedProcesses()
        self.beats: dict[str, Beat] = {}
        self.roles: list[RoleState] = []
        self.ended: dict[str, str] = {}  # dispensable workers that do not work any more, and why

    def check(self, *, bus_lost: str | None, step: int) -> None:
        """Polls the workers and kills frozen ones.

        ``step`` is the number of train steps done.

        Raises `ServicesLost` if all services have to start again, and `RunFailed` for an error that a role's own code
        raised.
        """
        before = self.beats
        self.beats = self._heartbeats.poll(self._services.handles(), timeout_s=POLL_S)
        for name in before.keys() - self.beats.keys():
            self._forget(name)
        self.roles = self._watch.roles(self.beats)
        for beat in self.beats.values():
            status = beat.status
            if beat.life == "alive" and status is not None and status.child_pids and status.host == process_host():
                self._owned.record(beat.name, status.pid, status.child_pids)
        self._owned.end_adopted_processes()
        for beat in self.beats.values():
            if beat.life == "alive" and beat.status is not None and beat.silent_s > self._heartbeat_timeout_s:
                self._kill_frozen(beat, beat.status)
        dispensable = self._services.dispensable()
        self.ended = {name: why for name in dispensable if name in self.beats and (why := ended(self.beats[name]))}
        needed = {name: beat for name, beat in self.beats.items() if name not in dispensable}
        failure = verdict(needed, bus=bus_lost, killed=self._killed, sure=self._suspicious)
        if failure is not None:
            raise failure
        self._suspicious = any(role.state == "failed" and role.name in needed for role in self.roles)
        self._record_restarts(step)

    def done(self, name: str) -> bool:
        """Is True if this worker has completed its part of the run."""
        beat = self.beats.get(name)
        return beat is not None and beat.status is not None and beat.status.state == "done"

    def progress(self, name: str) -> int:
        """Returns this worker's progress in a long operation (`WorkerStatus.progress`)."""
        beat = self.beats.get(name)
        return beat.status.progress if beat is not None and beat.status is not None else 0

    def _forget(self, name: str) -> None:
        """Forgets a worker that has left the run, and kills what it owned."""
        self._owned.forget(name)
        self._watch.forget(name)
        self._restarting.discard(name)
        known: dict[str, Any]
        for known in (self._restarts, self._killed, self._killed_at, self._killed_pids):
            known.pop(name, None)

    def _kill_frozen(self, beat: Beat, status: WorkerStatus) -> None:
        here = status.host == process_host()
        state = process_state(status.pid) if here else "on another host"
        if self._killed_pids.get(beat.name) == status.pid or state in EXITED:  # Ray has not noticed its end yet
            return
        self._killed_pids[beat.name] = status.pid
        self._killed_at[beat.name] = time.monotonic()
        self._killed[beat.name] = (
            f"froze (no answer for {beat.silent_s:.0f} s, state {state}) and was killed by SIGKILL"
        )
        self._services.kill_frozen(beat.name, status)

    def _record_restarts(self, step: int) -> None:
        """Records each restart once: when a worker is restarting, or when its process id or its count has changed."""
        for role in self.roles:
            more = role.restarts > self._restarts.get(role.name, 0)
            if (role.state == "restarting" or more) and role.name not in self._restarting:
                how = self._killed.pop(role.name, "") or self._own_process(role.name) or "died"
                noticed = self._killed_at.pop(role.name, None)
                self._recoveries.begin(IN_PLACE, f"{role.name} {how}", at_step=step, from_step=step, noticed=noticed)
            if role.state == "restarting":
                self._restarting.add(role.name)
            elif more:
                self._restarting.discard(role.name)
            self._restarts[role.name] = role.restarts

    def _own_process(self, name: str) -> str:
        """Returns how the process ended that a running worker has restarted, such as its engine."""
        beat = self.beats[name]
        return beat.status.last_restart if beat.life == "alive" and beat.status is not None else ""
