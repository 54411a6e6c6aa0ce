"""Follows a run in Slurm: prints its states, its output and its end.

Ctrl-C leaves the run running.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from launchers.slurm.job_state import JobState, SlurmRun, job_state
from launchers.submitted import RunEnd, read_end

FAILED = 1
INTERRUPTED = 130
POLL_S = 1.0
QUEUE_POLL_S = 10.0  # longest interval between two queries about a job in the queue
VISIBLE_S = 15.0  # a file of another node appears in a shared folder within this time
_SUBMITIT_PREFIX = "submitit "


@dataclass
class Output:
    """Prints the new lines of a growing file."""

    file: Path | None
    _offset: int = 0
    _rest: str = field(default="")

    def show(self) -> None:
        """Prints the new complete lines, except for lines of submitit."""
        if self.file is None or not self.file.is_file():
            return
        with self.file.open("rb") as stream:
            if self.file.stat().st_size < self._offset:  # a requeued job writes the file anew
                self._offset = 0
            stream.seek(self._offset)
            new = stream.read()
            self._offset += len(new)
        *lines, self._rest = (self._rest + new.decode(errors="replace")).split("\n")
        for line in lines:
            if not line.startswith(_SUBMITIT_PREFIX):
                print(f"  {line}", flush=True)


def follow(run: SlurmRun, *, output: bool = True) -> int:
    """Prints the job's states until the job ends. Prints its output, too, if ``output`` is set.

    Returns the run's exit code, or 1 if the run reported no exit code. Ctrl-C leaves the job running and returns 130.
    There is no timeout while the job waits in the queue, because Slurm decides how long a job waits.
    """
    printed, shown = Output(run.output if output else None), ""
    since = time.monotonic()
    try:
        while True:
            state = job_state(run.job_id)
            printed.show()
            if state.describe() != shown:
                shown, since = state.describe(), time.monotonic()
                print(f"relax: job {run.job_id} {shown}", flush=True)
            if state.ended:
                return _report_end(run, state, printed)
            waiting_long = state.state == "PENDING" and time.monotonic() - since > QUEUE_POLL_S
            time.sleep(QUEUE_POLL_S if waiting_long else POLL_S)
    except KeyboardInterrupt:
        print(
            f"\nrelax: job {run.job_id} goes on. Follow it: python -m launchers.jobs follow {run.run_dir}. End it with "
            f"a checkpoint: python -m launchers.jobs stop {run.run_dir}. End it at once: scancel {run.job_id}",
            file=sys.stderr,
        )
        return INTERRUPTED


def _report_end(run: SlurmRun, state: JobState, output: Output) -> int:
    """Prints how the run ended. First waits for the run's end.json if a run with this Slurm state writes one."""
    end = _await_end(run, expected=state.state in ("COMPLETED", "FAILED", "UNKNOWN"))
    output.show()
    if end is None:
        print(f"relax: the run reported no exit code: it {state.describe()}; resume=auto resumes its newest checkpoint")
        return FAILED
    cause = f": {end.cause}" if end.cause else ""
    print(f"relax: the run ended with exit code {end.code}{cause}; its files are in {run.run_dir}", flush=True)
    return end.code


def _await_end(run: SlurmRun, *, expected: bool) -> RunEnd | None:
    deadline = time.monotonic() + (VISIBLE_S if expected else POLL_S)
    while True:
        end = read_end(run.run_dir)
        if end is not None and end.attempt.rpartition("-r")[0] == run.job_id:
            return end
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S / 5)
