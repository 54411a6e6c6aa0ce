"""launcher=ray_job: a run on a Ray cluster that is there already, through its job API."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers.saved_run import CONFIG_VARIABLE
from launchers.submitted import JOB_FILE, put, submitted_text
from relax_core.config.checks.launcher_keys import environment
from relax_core.config.saved import REDACTED, to_yaml
from relax_core.config.schema import RayJobLauncherConfig, RelaxConfig
from relax_core.control.host.ray_session import ONE_THREAD

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

USAGE = 2
FAILED = 1
INTERRUPTED = 130
STOPPED = 128 + signal.SIGTERM
LOOK_S = 1.0
STOP_SPARE_S = 30  # beyond run.stop_timeout_s, before Ray kills a job that was told to stop


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """A run that was submitted. ``token_file``: of the cluster."""

    job_id: str
    address: str
    token_file: str | None
    run_dir: Path


def launch(config: RelaxConfig) -> int:
    """Submits the run and follows it to its end, or not (``launcher.follow``); or prints the KubeRay manifest. Returns
    the exit code: the run's own, 0 where it was only submitted, or 2 where the cluster did not take it."""
    launcher = launcher_of(config)
    try:
        if launcher.manifest:
            from launchers.kuberay import manifest

            print(manifest(config, sys.argv[1:]), end="")
            return 0
        job = submit(config, sys.argv[1:])
    except (ValueError, RuntimeError, ConnectionError) as error:
        print(f"relax: {_first_line(error)}", file=sys.stderr)
        return USAGE
    print(f"relax: job {job.job_id} at {job.address}, folder {job.run_dir}", flush=True)
    return follow(job) if launcher.follow else 0


def launcher_of(config: RelaxConfig) -> RayJobLauncherConfig:
    assert isinstance(config.launcher, RayJobLauncherConfig), "validated"
    return config.launcher


def submit(config: RelaxConfig, overrides: Sequence[str]) -> RayJob:
    """Sends it. Raises ConnectionError or RuntimeError where the cluster does not take it, ValueError for a secret."""
    launcher = launcher_of(config)
    refuse_secrets(config)
    job = RayJob(job_id="", address=launcher.address, token_file=launcher.token_file, run_dir=Path(config.run.dir))
    runtime: dict[str, Any] = {"env_vars": variables(config) | {CONFIG_VARIABLE: submitted_text(config, overrides)}}
    if launcher.working_dir is not None:
        runtime["working_dir"] = launcher.working_dir
    job_id = _client(job).submit_job(entrypoint=command(launcher), runtime_env=runtime)
    job = replace(job, job_id=job_id)
    if job.run_dir.parent.is_dir():  # this machine sees the run's folder too
        job.run_dir.mkdir(exist_ok=True)
        record = {"launcher": "ray_job", "job_id": job_id, "address": job.address, "token_file": job.token_file}
        put(job.run_dir / JOB_FILE, json.dumps(record | {"run_dir": str(job.run_dir)}))
    return job


def command(launcher: RayJobLauncherConfig, *words: str) -> str:
    """What runs on the cluster."""
    return " ".join([launcher.python, "-u", "-m", "launchers.saved_run", "--ray-address=auto", *words])


def variables(config: RelaxConfig) -> dict[str, str]:
    """Environment of the job's processes. A stop gives the run its time for a checkpoint; Ray's default is 3 s."""
    launcher, stop_s = launcher_of(config), int(config.run.stop_timeout_s) + STOP_SPARE_S
    return {**ONE_THREAD, "RAY_JOB_STOP_WAIT_TIME_S": str(stop_s), **environment(launcher.env)}


def refuse_secrets(config: RelaxConfig) -> None:
    """Raises ValueError for a configuration with a secret: whoever sees the job would read it."""
    if lines := [line.strip() for line in to_yaml(config).splitlines() if REDACTED in line]:
        raise ValueError(
            f"{lines[0]}: a job's configuration can be read in the cluster's dashboard. Set secrets as environment "
            "variables of the cluster's nodes, or as a Kubernetes secret."
        )


def follow(job: RayJob, *, output: bool = True) -> int:
    """Prints the job's states and output until it ends. Returns the run's exit code; 1 where it had none; 130 after
    Ctrl-C, which leaves it running."""
    from ray.job_submission import JobStatus

    client, shown, printed = _client(job), "", 0
    try:
        while True:
            info = client.get_job_info(job.job_id)
            if output and info.status is not JobStatus.PENDING:
                text = client.get_job_logs(job.job_id)
                print(text[printed:], end="", flush=True)
                printed = len(text)
            if info.status.value != shown:
                shown = info.status.value
                print(f"relax: job {job.job_id} {shown.lower()}", flush=True)
            if info.status.is_terminal():
                return _end(job, info)
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        how = f"python -m launchers.jobs follow {job.run_dir}, or stop in its place"
        print(f"\nrelax: job {job.job_id} goes on. Look after it: {how}", file=sys.stderr)
        return INTERRUPTED


def look_after(command: str, record: dict[str, Any]) -> int:
    """`python -m launchers.jobs` for a job of this kind."""
    job = RayJob(
        job_id=record["job_id"],
        address=record["address"],
        token_file=record["token_file"],
        run_dir=Path(record["run_dir"]),
    )
    if command == "follow":
        return follow(job)
    client = _client(job)
    status = client.get_job_status(job.job_id)
    print(f"relax: job {job.job_id} {status.value.lower()}")
    if command == "stop" and not status.is_terminal():
        client.stop_job(job.job_id)
        print(f"relax: job {job.job_id} was told to end with a checkpoint")
    return 0


def _end(job: RayJob, info: Any) -> int:
    """Ray's own command says 1 for whatever code a driver ends with."""
    code = STOPPED if info.status.value == "STOPPED" else info.driver_exit_code  # Ray keeps no code of a stopped one
    if code is None:
        print(f"relax: the run said no exit code: {info.message}", file=sys.stderr)
        return FAILED
    code = code if code >= 0 else 128 - code  # ended by a signal
    print(f"relax: the run ended with exit code {code}; all of it is in {job.run_dir}", flush=True)
    return int(code)


def _client(job: RayJob) -> JobSubmissionClient:
    """Raises ConnectionError where nothing answers, RuntimeError where the token is missing or wrong."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    headers = None
    if job.token_file is not None:
        headers = {"Authorization": f"Bearer {Path(job.token_file).read_text().strip()}"}
    try:
        return JobSubmissionClient(job.address, headers=headers)
    except AuthenticationError as error:
        told = f"launcher.token_file={'null' if job.token_file is None else job.token_file}"
        raise RuntimeError(f"{told}: {job.address} says: {_first_line(error)}. Name a file with its token.") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
