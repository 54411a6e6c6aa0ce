"""Queries Slurm for the state of a job, on clusters with and without an accounting database."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

WORDS = {
    "COMPLETED": "completed",
    "FAILED": "failed",
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit",
    "NODE_FAIL": "lost a node",
    "PREEMPTED": "was preempted by another job",
    "OUT_OF_MEMORY": "ran out of memory",
    "BOOT_FAIL": "had a node that did not boot",
    "DEADLINE": "could not start before its deadline",
    "LAUNCH_FAILED": "could not be started",
    "UNKNOWN": "left the queue, and Slurm has no record of it any more",
}
ENDED = frozenset(WORDS)
CALL_S = 30.0


@dataclass(frozen=True, kw_only=True)
class SlurmRun:
    """Describes a run that was submitted to Slurm.

    ``output`` is the output file of the job's first task.
    """

    job_id: str
    run_dir: Path
    output: Path


@dataclass(frozen=True, kw_only=True)
class JobState:
    """Holds the state of a job.

    ``state`` is Slurm's name of the state, or UNKNOWN if Slurm has no record of the job any more. ``reason`` is Slurm's
    reason for the wait or the end. ``nodes`` are the nodes of the job. ``restarts`` is the number of requeues.
    """

    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0

    @property
    def ended(self) -> bool:
        """Returns whether the job has ended: it is not running and not waiting."""
        return self.state in ENDED

    def describe(self) -> str:
        """Returns the state as words that complete "the job …", such as "ran out of memory"."""
        again = f", started again {self.restarts} times" if self.restarts else ""
        if self.ended:
            return WORDS[self.state] + again
        if self.state == "PENDING":
            return f"waits in the queue ({self.reason}){again}"
        return f"{self.state.lower().replace('_', ' ')}{f' on {self.nodes}' if self.nodes else ''}{again}"


def job_state(job_id: str) -> JobState:
    """Returns the state of a job from Slurm's controller, or from the accounting database if the controller forgot it.

    Raises RuntimeError if Slurm does not answer. The controller forgets a job some minutes after the job's end.
    """
    shown = slurm_call("scontrol", "show", "job", "--oneliner", job_id)
    if shown.returncode == 0:
        return _of_controller(shown.stdout)
    if "Invalid job id" not in shown.stderr:
        raise RuntimeError(f"Slurm does not answer: {shown.stderr.strip()}")
    recorded = slurm_call(
        "sacct", "--jobs", job_id, "--allocations", "--noheader", "--parsable2", "--format=State,NodeList"
    )
    if recorded.returncode == 0 and recorded.stdout.strip():
        state, nodes = recorded.stdout.splitlines()[-1].split("|")
        return JobState(state=state.split()[0], nodes=nodes)  # such as "CANCELLED by 0"
    return JobState(state="UNKNOWN")


def _of_controller(text: str) -> JobState:
    """Parses scontrol's line of key=value pairs. A pending job array has one line for all jobs."""
    fields = dict(word.split("=", 1) for word in text.splitlines()[0].split() if "=" in word)
    nodes = fields.get("NodeList", "")
    return JobState(
        state=fields["JobState"],
        reason=fields.get("Reason", ""),
        nodes="" if nodes == "(null)" else nodes,
        restarts=int(fields.get("Restarts", "0")),
    )


def slurm_call(*command: str) -> subprocess.CompletedProcess[str]:
    """Executes a Slurm command. Raises RuntimeError if it does not end within ``CALL_S`` seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=CALL_S)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, stdout="", stderr=f"{command[0]} is not installed")
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} did not answer within {CALL_S:.0f} s") from error


def slurm_answer(*command: str) -> str:
    """Returns the output of a Slurm command. Raises RuntimeError with its error text if it fails."""
    done = slurm_call(*command)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
