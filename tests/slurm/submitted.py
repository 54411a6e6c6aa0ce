"""Runs `python -m relax_core launcher=slurm …` on the temporary cluster and observes it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.live_run import STOPPING
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 600.0
POLL_S = 0.05
FAST = ("eval.every=0", "launcher.cpus_per_node=2", "run.export_hf=false")


def _hear_ctrl_c() -> None:
    """Resets SIGINT, because a shell makes background processes ignore SIGINT, and their children inherit this."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Submitted:
    """Holds the process that submits and follows a run. ``folder`` is the run's folder."""

    def __init__(self, cluster: Cluster, folder: Path, *overrides: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relax_core", "launcher=slurm", f"run.dir={folder}", *FAST, *overrides],
            cwd=ROOT,
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_hear_ctrl_c,
        )

    def finish(self) -> tuple[int, str]:
        """Waits for the end, and returns the exit code and the output."""
        output, _ = self._process.communicate(timeout=DEADLINE_S)
        return self._process.returncode, output

    def interrupt(self) -> None:
        os.kill(self._process.pid, 2)

    def wait_for(self, what: str, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S:.0f} s; {self.logs()}"
            assert self._process.poll() is None, f"the run ended before {what}: {self.finish()}"
            time.sleep(POLL_S)

    def wait_step(self, step: int) -> None:
        """Blocks until the trainer has reported train step ``step``."""
        self.wait_for(f"step {step}", lambda: max(self.steps(), default=-1) >= step)

    def job_id(self) -> str:
        """Waits for the submission of the job and returns the job's id."""
        self.wait_for("its submission", (self.folder / "job.json").exists)
        return str(json.loads((self.folder / "job.json").read_text())["job_id"])

    def start_again(self) -> None:
        """Waits until the job is queued again, and starts it at once, without Slurm's wait of two minutes."""
        job = self.job_id()
        self.wait_for(
            "its second turn", lambda: "Reason=BeginTime" in self.cluster.call("scontrol", "show", "job", job)
        )
        self.cluster.call("scontrol", "update", f"jobid={job}", "StartTime=now")

    def wait_stop_received(self) -> None:
        """Blocks until the trainer has the request to stop after its step."""
        self.wait_for("the stop to be heard", lambda: STOPPING in self.logs())

    def steps(self) -> list[int]:
        """Returns the train steps in the order of their records. A repeated step appears twice."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record["step"] for record in records if record["source"] == "actor"]

    def checkpoints(self) -> list[int]:
        found = self.folder.glob("checkpoints/step_*/meta.json")
        return sorted(int(file.parent.name.removeprefix("step_")) for file in found)

    def summary(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return values

    def logs(self) -> str:
        return "\n".join(file.read_text()[-3000:] for file in self.folder.glob("slurm/*.out"))
