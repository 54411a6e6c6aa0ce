"""Tests launcher=ray_job on a real Ray cluster with a dashboard and a token."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from relax_core.contracts.process_trees import kill_trees
from relax_core.control.host.ray_session import new_token_file

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300.0
POLL_S = 0.1
ADDRESS = re.compile("RAY_API_SERVER_ADDRESS='(http://[0-9.:]+)'")  # the address in the output of `ray start`


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    address: str
    token_file: Path

    def relax(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        """Submits a run and, by default, follows it."""
        launcher = ["launcher=ray_job", f"launcher.address={self.address}", f"launcher.python={sys.executable}"]
        return call("relax_core", *launcher, *overrides)


def call(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="rj"))
    token_file, log_file = new_token_file(folder / "token"), folder / "head.log"
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "TMPDIR": str(folder),
    }
    words = [
        "start",
        "--head",
        "--block",
        "--port=0",
        "--num-cpus=4",
        "--disable-usage-stats",
        f"--temp-dir={folder}/ray",
    ]
    words += ["--dashboard-port=0", "--dashboard-agent-listen-port=0", "--include-dashboard=true"]
    with log_file.open("wb") as log:
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words, f"--object-store-memory={200 << 20}"],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = wait_for_address(head, log_file)
        wait_until_it_takes_jobs(address, token_file)
        yield RayCluster(address=address, token_file=token_file)
    finally:
        kill_trees([head.pid])
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_address(head: subprocess.Popen[bytes], log_file: Path) -> str:
    """Returns the address of the head's dashboard. The dashboard chose a free port."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := ADDRESS.search(log_file.read_text())) is None:
        assert head.poll() is None and time.monotonic() < deadline, log_file.read_text()
        time.sleep(POLL_S)
    return found[1]


def wait_until_it_takes_jobs(address: str, token_file: Path) -> None:
    from ray.job_submission import JobSubmissionClient

    headers = {"Authorization": f"Bearer {token_file.read_text()}"}
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            JobSubmissionClient(address, headers=headers).submit_job(entrypoint="true")
            return
        except (ConnectionError, RuntimeError):
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def test_the_exit_code_is_the_runs_own(cluster: RayCluster, tmp_path: Path) -> None:
    token = f"launcher.token_file={cluster.token_file}"
    nowhere = ["model=qwen3", "model.path=/nowhere"]  # only the cluster finds this error
    done = cluster.relax(token, f"run.dir={tmp_path}/run", *nowhere)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "model.path=/nowhere: no such folder." in done.stdout
    assert "the run ended with exit code 2" in done.stdout


def test_the_cluster_wants_its_token(cluster: RayCluster, tmp_path: Path) -> None:
    done = cluster.relax(f"run.dir={tmp_path}/run")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "launcher.token_file=null: " in done.stderr and "Traceback" not in done.stderr


def test_a_stop_writes_a_checkpoint(cluster: RayCluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = [
        "launcher.follow=false",
        f"launcher.token_file={cluster.token_file}",
        "run.steps=1000000",
        "eval.every=0",
    ]
    done = cluster.relax(*overrides, "run.save_every=0", f"run.dir={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    deadline = time.monotonic() + DEADLINE_S
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and '"actor"' in metrics.read_text()):
        assert time.monotonic() < deadline, call("launchers.jobs", "status", str(folder))
        time.sleep(POLL_S)
    stopped = call("launchers.jobs", "stop", str(folder))
    assert stopped.returncode == 0 and "asked to end with a checkpoint" in stopped.stdout, stopped.stderr
    followed = call("launchers.jobs", "follow", str(folder))
    assert followed.returncode == 128 + signal.SIGTERM, followed.stdout + followed.stderr
    assert "step 1" in followed.stdout or "stopped after" in followed.stdout
    (checkpoint,) = folder.glob("checkpoints/step_*/meta.json")
    assert int(checkpoint.parent.name.removeprefix("step_")) > 0
    assert not list(folder.glob("relax-*")), "published weights are removed"
