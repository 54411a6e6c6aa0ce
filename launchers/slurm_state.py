"""What Slurm says of a job, on clusters with accounting and without."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

WORDS = {
    "COMPLETED": "ended well",
    "FAILED": "failed",
    "CANCELLED": "was cancelled",
    "TIMEOUT": "met its time limit",
    "NODE_FAIL": "lost a node",
    "PREEMPTED": "was ended for another job",
    "OUT_OF_MEMORY": "ran out of memory",
    "BOOT_FAIL": "found a node that does not boot",
    "DEADLINE": "could not start in time",
    "LAUNCH_FAILED": "could not be started",
    "GONE": "left the queue, and Slurm does not know it any more",
}
ENDED = frozenset(WORDS)
CALL_S = 30.0


@dataclass(frozen=True, kw_only=True)
class JobState:
    """``state``: Slurm's word, or GONE for a job that it has forgotten. ``reason``: why it waits, or ended.
    ``nodes``: where it runs. ``restarts``: times that it was queued again."""

    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def words(self) -> str:
        """For the screen."""
        again = f", started again {self.restarts} times" if self.restarts else ""
        if self.ended:
            return WORDS[self.state] + again
        if self.state == "PENDING":
            return f"waits in the queue ({self.reason}){again}"
        return f"{self.state.lower().replace('_', ' ')}{f' on {self.nodes}' if self.nodes else ''}{again}"


def job_state(job_id: str) -> JobState:
    """Asks the controller, which knows a job until some minutes after its end; then the accounting, where there is
    one. Raises RuntimeError where Slurm does not answer."""
    shown = slurm_call("scontrol", "show", "job", "--oneliner", job_id)
    if shown.returncode == 0:
        return _of_controller(shown.stdout)
    if "Invalid job id" not in shown.stderr:
        raise RuntimeError(f"Slurm does not answer: {shown.stderr.strip()}")
    told = slurm_call(
        "sacct", "--jobs", job_id, "--allocations", "--noheader", "--parsable2", "--format=State,NodeList"
    )
    if told.returncode == 0 and told.stdout.strip():
        state, nodes = told.stdout.splitlines()[-1].split("|")
        return JobState(state=state.split()[0], nodes=nodes)  # "CANCELLED by 0"
    return JobState(state="GONE")


def _of_controller(text: str) -> JobState:
    """One line of key=value a job; of a job array, whose elements are not apart yet, one for all of them."""
    fields = dict(word.split("=", 1) for word in text.splitlines()[0].split() if "=" in word)
    nodes = fields.get("NodeList", "")
    return JobState(
        state=fields["JobState"],
        reason=fields.get("Reason", ""),
        nodes="" if nodes == "(null)" else nodes,
        restarts=int(fields.get("Restarts", "0")),
    )


def slurm_call(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs one of Slurm's commands; raises RuntimeError where it does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=CALL_S)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, stdout="", stderr=f"{command[0]} is not installed")
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} did not answer within {CALL_S:.0f} s") from error


def slurm_answer(*command: str) -> str:
    """What it prints; raises RuntimeError with its own words where it fails."""
    done = slurm_call(*command)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
