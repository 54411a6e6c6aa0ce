"""Records the recoveries of a run: the cause, the tier, and the time until the next train step."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from relax_core.contracts.outage import is_outage
from relax_core.roles.failure import failure_line

IN_PLACE = 1
FROM_CHECKPOINT = 2


def recoveries_file(run_dir: Path) -> Path:
    """Returns the path of the file in which a run records its recoveries."""
    return run_dir / "logs" / "recoveries.json"


@dataclass(kw_only=True)
class Recovery:
    """Describes one recovery.

    In tier 1 one process restarts in place; in tier 2 all services restart from a checkpoint. ``at_step`` is the number
    of train steps done when the loss was noticed. ``from_step`` is the step that the run continued from. ``time_s`` is
    the Unix time in seconds when the loss was noticed. ``seconds`` is the time from ``time_s`` to the end of the next
    train step. It is None until this step ends.
    """

    tier: int
    cause: str
    at_step: int
    from_step: int
    time_s: float | None = None  # missing in files of an older Relax
    seconds: float | None = None


class Recoveries:
    """Holds all recoveries of a run, in order. Writes them to ``file``, and the next controller reads this file.

    ``report`` is called with a line of text when a recovery begins and when training continues. ``begun`` is called
    with the tier and the cause when a recovery begins.
    """

    def __init__(
        self,
        file: Path,
        *,
        report: Callable[[str], None],
        begun: Callable[[int, str], None] = lambda tier, cause: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._report, self._begun = report, begun
        self._clock = clock
        self._all: list[Recovery] = []
        self._open: list[tuple[Recovery, float]] = []

    def load(self) -> None:
        """Reads the recoveries that earlier controllers of this run recorded."""
        if self._file.exists():
            self._all = msgspec.json.decode(self._file.read_bytes(), type=list[Recovery])

    def begin(self, tier: int, cause: str, *, at_step: int, from_step: int, noticed: float | None = None) -> None:
        """Records that a recovery begins now or, with ``noticed``, began at this clock time."""
        now = self._clock()
        began = now if noticed is None else noticed
        time_s = time.time() - (now - began)
        recovery = Recovery(tier=tier, cause=cause, at_step=at_step, from_step=from_step, time_s=time_s)
        self._all.append(recovery)
        self._open.append((recovery, began))
        done = "started again in place" if tier == IN_PLACE else f"all services start again from step {from_step}"
        self._report(f"tier {tier} at step {at_step}: {cause}; {done}")
        self._begun(tier, cause)
        self._keep()

    def _keep(self) -> None:
        """Writes the file. During a disk outage the run continues, and the next change writes the file."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial = self._file.with_name(f"{self._file.name}.partial")
            partial.write_bytes(msgspec.json.encode(self._all))
            os.replace(partial, self._file)  # atomic, so the earlier file stays intact if the controller is killed
        except OSError as error:
            if not is_outage(error):
                raise
            self._report(f"{self._file} is not written: {error}")

    def step_done(self) -> None:
        """Records the end of a train step. All open recoveries have then succeeded."""
        for recovery, began in self._open:
            recovery.seconds = self._clock() - began
            self._report(
                f"tier {recovery.tier} at step {recovery.at_step}: {recovery.cause}; training went on from step "
                f"{recovery.from_step} after {recovery.seconds:.1f} s"
            )
        if self._open:
            self._open.clear()
            self._keep()

    def count(self, tier: int) -> int:
        """Returns the number of recoveries of this tier."""
        return sum(recovery.tier == tier for recovery in self._all)

    def first_cause(self, tier: int) -> str:
        """Returns the cause of the first recovery of this tier."""
        return next(recovery.cause for recovery in self._all if recovery.tier == tier)

    def as_records(self) -> list[dict[str, Any]]:
        """Returns the recoveries as dicts for summary.json."""
        return [asdict(recovery) for recovery in self._all]


# -- Errors that end a run or restart the services --------------------------------------------------------------------
class RunFailed(RuntimeError):
    """Raised if the run has failed and cannot continue.

    The text is the first cause in one line, with the role that failed. ``log`` is the traceback, for the run's logs.
    ``worker`` is the name of the worker that failed by its own error.
    """

    def __init__(self, text: str, *, log: str = "", worker: str | None = None) -> None:
        super().__init__(text)
        self.log = log
        self.worker = worker


class ServicesLost(RunFailed):
    """Raised if the services were lost and can restart from the newest checkpoint."""


def run_failed(what: str, error: BaseException) -> RunFailed:
    """Returns the failure for an error outside all workers that ended the run. The text begins with ``what``."""
    return RunFailed(f"{what}: {failure_line(error)}", log="".join(traceback.format_exception(error)))
