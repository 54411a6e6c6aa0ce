"""`python -m launchers.jobs` prints the state of a submitted run, follows it, or stops it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from launchers.slurm.job_state import SlurmRun, job_state, slurm_call
from launchers.submitted import JOB_FILE

USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Executes the command.

    Returns the exit code: the run's exit code for ``follow``, 2 for wrong arguments, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m launchers.jobs", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("status", "print its state"),
        ("follow", "print its output until it ends; returns the run's exit code"),
        ("stop", "end it with a checkpoint after the current step"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("folder", type=Path, help="the run's folder")
    parsed = parser.parse_args(arguments)
    try:
        return _act(parsed.command, parsed.folder.absolute())
    except (ValueError, RuntimeError) as error:
        print(f"relax: {error}", file=sys.stderr)
        return USAGE


def _act(command: str, folder: Path) -> int:
    file = folder / JOB_FILE
    if not file.is_file():
        raise ValueError(f"{folder} has no {JOB_FILE}: it is not the folder of a submitted run")
    job = json.loads(file.read_text())
    if job["launcher"] == "slurm":
        return _slurm(command, SlurmRun(job_id=job["job_id"], run_dir=folder, output=Path(job["output"])))
    from launchers.ray_job.job_client import execute_command

    return execute_command(command, job)


def _slurm(command: str, run: SlurmRun) -> int:
    from launchers.slurm.follow import follow

    if command == "follow":
        return follow(run)
    state = job_state(run.job_id)
    print(f"relax: job {run.job_id} {state.describe()}")
    if command == "stop" and not state.ended:
        signal = ["--signal=USR1"] if state.state == "RUNNING" else []  # a job in the queue has nothing to save
        done = slurm_call("scancel", *signal, run.job_id)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        print(f"relax: job {run.job_id} was asked to end{' with a checkpoint' if signal else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
