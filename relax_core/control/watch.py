"""Who is how: from the workers' statuses to what the panel shows, and to the first failure that ends a run."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping

from relax_core.observe.states import RoleState, RoleStateName
from relax_core.roles.failure import failure_line
from relax_core.roles.worker import WorkerStatus


class RunFailed(RuntimeError):
    """The run cannot go on; the text is the first cause in one line, with its role. ``log``: its traceback, for the
    run's logs."""

    def __init__(self, text: str, *, log: str = "") -> None:
        super().__init__(text)
        self.log = log


def run_failed(what: str, error: BaseException) -> RunFailed:
    """What a user reads of an error that ended the run outside of any worker."""
    return RunFailed(f"{what}: {failure_line(error)}", log="".join(traceback.format_exception(error)))


class RoleWatch:
    """Remembers each worker's process, so that restarts are counted."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._restarts: dict[str, int] = {}

    def roles(self, statuses: Mapping[str, WorkerStatus | str]) -> list[RoleState]:
        """The workers' states; raises `RunFailed` for the first that failed or is dead for good."""
        failed = [
            status for status in statuses.values() if isinstance(status, WorkerStatus) and status.state == "failed"
        ]
        for status in sorted(failed, key=lambda status: status.since):
            raise RunFailed(f"{status.name} failed: {status.detail}", log=status.error or "")
        for name, words in statuses.items():
            if isinstance(words, str) and words.startswith("dead"):
                raise RunFailed(f"{name} is {words.splitlines()[0]}", log=words)
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
