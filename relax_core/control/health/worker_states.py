"""Who is how: from the workers' signs of life to what the panel shows, and to the cause that ends an attempt."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

from relax_core.observe.terminal.role_states import RoleState, RoleStateName
from relax_core.roles.process.failure import failure_line
from relax_core.roles.process.worker import WorkerStatus

if TYPE_CHECKING:
    from relax_core.control.health.heartbeats import Beat  # imports Ray, which must first be told its token

STATES: Mapping[str, RoleStateName] = {"restarting": "restarting", "dead": "failed", "starting": "starting"}


class RunFailed(RuntimeError):
    """The run cannot go on; the text is the first cause in one line, with its role. ``log``: its traceback, for the
    run's logs. ``worker``: whose own failure it is, by name."""

    def __init__(self, text: str, *, log: str = "", worker: str | None = None) -> None:
        super().__init__(text)
        self.log = log
        self.worker = worker


class ServicesLost(RunFailed):
    """The same, where the services can be started again from the newest checkpoint."""


def run_failed(what: str, error: BaseException) -> RunFailed:
    """What a user reads of an error that ended the run outside of any worker."""
    return RunFailed(f"{what}: {failure_line(error)}", log="".join(traceback.format_exception(error)))


class RoleWatch:
    """Remembers each worker's process, so that restarts are counted."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._restarts: dict[str, int] = {}

    def roles(self, beats: Mapping[str, Beat]) -> list[RoleState]:
        """The workers' states, as the panel shows them."""
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
            detail="its process is gone" if beat.life == "dead" else "",
        )


def verdict(beats: Mapping[str, Beat], *, bus: str | None, killed: Mapping[str, str], sure: bool) -> RunFailed | None:
    """The first cause for which these services cannot go on, or None.

    ``bus``: how the bus was lost. ``killed``: workers that were killed because they froze, and how that showed.
    A process that is gone comes before those that failed of it, and of those the earliest counts. What a role's own
    code raised ends the run, but only when ``sure``: a death that is behind it may show a moment later.
    """
    if bus is not None:
        return ServicesLost(f"the bus {bus}")
    dead = [beat for beat in beats.values() if beat.life == "dead"]
    if dead:
        names = [beat.name for beat in dead]
        first = next((beat for beat in dead if beat.name in killed), dead[0])
        others = f" (and with it {', '.join(name for name in names if name != first.name)})" if names[1:] else ""
        return ServicesLost(f"{first.name} {killed.get(first.name, 'died')}{others}", log=first.words)
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


def _failed(beat: Beat) -> WorkerStatus | None:
    return beat.status if beat.life == "alive" and beat.status and beat.status.state == "failed" else None
