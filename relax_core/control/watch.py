"""Who is how: from the workers' statuses to what the panel shows, and to the first failure that ends a run."""

from __future__ import annotations

import time
from collections.abc import Mapping

from relax_core.observe.states import RoleState, RoleStateName
from relax_core.roles.worker import WorkerStatus


class RunFailed(RuntimeError):
    """The run cannot go on; the text is the first cause, with its role."""


class RoleWatch:
    """Remembers each worker's process, so that restarts are counted."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._restarts: dict[str, int] = {}

    def roles(self, statuses: Mapping[str, WorkerStatus | str]) -> list[RoleState]:
        """The workers' states; raises `RunFailed` for the first that failed or is dead for good."""
        failures = [
            f"{name} failed: {status.detail}\n{status.error}"
            for name, status in sorted(statuses.items(), key=lambda item: _since(item[1]))
            if isinstance(status, WorkerStatus) and status.state == "failed"
        ]
        failures += [f"{name} is {status}" for name, status in statuses.items() if str(status).startswith("dead")]
        if failures:
            raise RunFailed(failures[0])
        return [self._role(name, status) for name, status in statuses.items()]

    def _role(self, name: str, status: WorkerStatus | str) -> RoleState:
        if isinstance(status, str):
            state: RoleStateName = "restarting" if status == "restarting" else "waiting"
            return RoleState(name=name, state=state, since_s=0.0, restarts=self._restarts.get(name, 0), detail=status)
        if self._pids.setdefault(name, status.pid) != status.pid:
            self._pids[name] = status.pid
            self._restarts[name] = self._restarts.get(name, 0) + 1
        return RoleState(
            name=name,
            state=status.state,
            since_s=time.time() - status.since,
            restarts=self._restarts.get(name, 0) + status.restarts,
            detail=status.detail,
        )


def _since(status: WorkerStatus | str) -> float:
    return status.since if isinstance(status, WorkerStatus) else 0.0
