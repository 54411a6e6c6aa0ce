"""Follows a run in Slurm: its states, its output, its end. Ctrl-C leaves it running."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from launchers.slurm import SlurmRun
from launchers.slurm_state import JobState, job_state
from launchers.submitted import RunEnd, read_end

FAILED = 1
INTERRUPTED = 130
LOOK_S = 1.0
RARELY_S = 10.0  # how often Slurm is asked about a job that waits for long
SEEN_S = 15.0  # a shared folder shows another node's file within this
_SUBMITITS = "submitit "


@dataclass
class Output:
    """Prints what a file has more than at the last look."""

    file: Path | None
    _offset: int = 0
    _rest: str = field(default="")

    def show(self) -> None:
        if self.file is None or not self.file.is_file():
            return
        with self.file.open("rb") as stream:
            if self.file.stat().st_size < self._offset:  # a job that was queued again began anew
                self._offset = 0
            stream.seek(self._offset)
            new = stream.read()
            self._offset += len(new)
        *lines, self._rest = (self._rest + new.decode(errors="replace")).split("\n")
        for line in lines:
            if not line.startswith(_SUBMITITS):
                print(f"  {line}", flush=True)


def follow(run: SlurmRun, *, output: bool = True) -> int:
    """Returns the run's exit code when it has ended; 1 where it could not say one; 130 after Ctrl-C, which leaves the
    job alone. Waits in the queue as long as Slurm lets it. ``output``: print what the run prints, too."""
    printed, shown = Output(run.output if output else None), ""
    since = time.monotonic()
    try:
        while True:
            state = job_state(run.job_id)
            printed.show()
            if state.words() != shown:
                shown, since = state.words(), time.monotonic()
                print(f"relax: job {run.job_id} {shown}", flush=True)
            if state.ended:
                return tell_end(run, state, printed)
            waiting_long = state.state == "PENDING" and time.monotonic() - since > RARELY_S
            time.sleep(RARELY_S if waiting_long else LOOK_S)
    except KeyboardInterrupt:
        print(f"\nrelax: job {run.job_id} goes on. {how_to(run)}", file=sys.stderr)
        return INTERRUPTED


def how_to(run: SlurmRun) -> str:
    """What can be done with a job that nobody follows."""
    return (
        f"Follow it: python -m launchers.jobs follow {run.run_dir}. End it with a checkpoint: python -m launchers.jobs "
        f"stop {run.run_dir}. End it at once: scancel {run.job_id}"
    )


def tell_end(run: SlurmRun, state: JobState, output: Output) -> int:
    """Waits for the run's last word where Slurm says that there must be one, and prints what ended how."""
    end = _last_word(run, expected=state.state in ("COMPLETED", "FAILED", "GONE"))
    output.show()
    if end is None:
        print(f"relax: the run said no last word: it {state.words()}; resume=auto goes on from its newest checkpoint")
        return FAILED
    cause = f": {end.cause}" if end.cause else ""
    print(f"relax: the run ended with exit code {end.code}{cause}; all of it is in {run.run_dir}", flush=True)
    return end.code


def _last_word(run: SlurmRun, *, expected: bool) -> RunEnd | None:
    deadline = time.monotonic() + (SEEN_S if expected else LOOK_S)
    while True:
        end = read_end(run.run_dir)
        if end is not None and end.attempt.rpartition("-r")[0] == run.job_id:
            return end
        if time.monotonic() > deadline:
            return None
        time.sleep(LOOK_S / 5)
