"""Derives the states that the panel shows, and the cause that ends an attempt, from the workers' heartbeats."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

from relax_core.observe.panel_view import RoleState, RoleStateName
from relax_core.roles.process.failure import failure_line
from relax_core.roles.process.worker import WorkerStatus

if TYPE_CHECKING:
    from relax_core.control.health.heartbeats import Beat  # imports Ray, which then reads the path of its token

STATES: Mapping[str, RoleStateName] = {"restarting": "restarting", "dead": "failed", "starting": "starting"}


class RunFailed(RuntimeError):
    """Says that the run cannot go on.

    The text is the first cause in one line, with its role. ``log`` is the traceback, for the run's logs. ``worker`` is
    the name of the worker that failed by itself.
    """

    def __init__(self, text: str, *, log: str = "", worker: str | None = None) -> None:
        super().__init__(text)
        self.log = log
        self.worker = worker


class ServicesLost(RunFailed):
    """Says that the services were lost and can start again from the newest checkpoint."""


def run_failed(what: str, error: BaseException) -> RunFailed:
    """Returns the failure for an error that ended the run outside of every worker. ``what`` begins its text."""
    return RunFailed(f"{what}: {failure_line(error)}", log="".join(traceback.format_exception(error)))


class RoleWatch:
    """Records each worker's process id, so that it can count restarts."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._restarts: dict[str, int] = {}

    def forget(self, name: str) -> None:
        """Forgets a worker that has left the run."""
        self._pids.pop(name, None)
        self._restarts.pop(name, None)

    def roles(self, beats: Mapping[str, Beat]) -> list[RoleState]:
        """Returns the workers' states as the panel shows them."""
        return [self._role(beat) for beat in beats.values()]

    def _role(self, beat: Beat) -> RoleState:
        status = beat.status
        if beat.life == "alive" and status is not None:
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


def verdict(beats: Mapping[str, Beat], *, bus: str | None, killed: Mapping[str, str], sure: bool) -> RunFailed | None:
    """Returns the first cause for which these services cannot go on, or None.

    ``bus`` says how the bus was lost. ``killed`` maps the workers that were killed because they froze to the evidence.
    A process that has died comes before workers that failed because of it; among failed workers the earliest counts. An
    error of a role's own code ends the run only if ``sure`` is True, because the death of another process, which may be
    its cause, may be noticed a moment later.
    """
    if bus is not None:
        return ServicesLost(f"the bus {bus}")
    dead = [beat for beat in beats.values() if beat.life == "dead"]
    if dead:
        names = [beat.name for beat in dead]
        first = next((beat for beat in dead if beat.name in killed), dead[0])
        others = f" (and with it {', '.join(name for name in names if name != first.name)})" if names[1:] else ""
        return ServicesLost(f"{first.name} {killed.get(first.name, 'died')}{others}", log=first.cause)
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


def ended(beat: Beat) -> str:
    """Returns why this worker does not work any more, or "" while it does."""
    if beat.life == "dead":
        return "its process has exited and was restarted too often"
    failed = _failed(beat)
    return "" if failed is None else failed.detail


def _failed(beat: Beat) -> WorkerStatus | None:
    return beat.status if beat.life == "alive" and beat.status and beat.status.state == "failed" else None
