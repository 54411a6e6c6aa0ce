"""Submits a run to an existing Ray cluster through Ray's job API, and follows or stops the job."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers.ray_job.entrypoint import entrypoint, job_text, launcher_of, variables
from launchers.saved_run import CONFIG_VARIABLE
from launchers.submitted import JOB_FILE, write_atomically
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.private_folder import private_folder

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

USAGE = 2
FAILED = 1
INTERRUPTED = 130
STOPPED = 128 + signal.SIGTERM
POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """Describes a run that was submitted.

    ``token_file`` is the file with the cluster's token, or None if the cluster has no token.
    """

    job_id: str
    address: str
    token_file: str | None
    run_dir: Path


def launch(config: RelaxConfig) -> int:
    """Submits the run, or prints its KubeRay manifest if ``launcher.dry_run`` is set.

    Returns the exit code. With ``launcher.follow``, follows the run to its end and returns the run's exit code. Returns
    0 if the run was only submitted or printed, and 2 if the cluster rejects the run.
    """
    launcher = launcher_of(config)
    try:
        if launcher.dry_run:
            from launchers.ray_job.kuberay_manifest import manifest

            print(manifest(config, sys.argv[1:]), end="")
            return 0
        job = submit(config, sys.argv[1:])
    except (ValueError, RuntimeError, ConnectionError) as error:
        print(f"relax: {_first_line(error)}", file=sys.stderr)
        return USAGE
    print(f"relax: job {job.job_id} at {job.address}, folder {job.run_dir}", flush=True)
    return follow(job) if launcher.follow else 0


def submit(config: RelaxConfig, overrides: Sequence[str]) -> RayJob:
    """Submits the run as a job and, if this machine has access to the run's folder, writes job.json into it.

    Raises ConnectionError or RuntimeError if the cluster rejects the job, and ValueError if the configuration contains
    a secret.
    """
    launcher = launcher_of(config)
    job = RayJob(job_id="", address=launcher.address, token_file=launcher.token_file, run_dir=Path(config.run.dir))
    runtime = {"env_vars": variables(config) | {CONFIG_VARIABLE: job_text(config, overrides)}}
    job_id = _client(job).submit_job(entrypoint=entrypoint(launcher), runtime_env=runtime)
    job = replace(job, job_id=job_id)
    if job.run_dir.parent.is_dir():  # this machine has access to the run's folder
        private_folder(job.run_dir, key="run.dir")
        record = {"launcher": "ray_job", "job_id": job_id, "address": job.address, "token_file": job.token_file}
        write_atomically(job.run_dir / JOB_FILE, json.dumps(record | {"run_dir": str(job.run_dir)}))
    return job


def follow(job: RayJob, *, output: bool = True) -> int:
    """Prints the job's states until the job ends. Prints its output, too, if ``output`` is set.

    Returns the run's exit code, or 1 if the run had no exit code. Ctrl-C leaves the job running and returns 130.
    """
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
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        folder = job.run_dir
        print(
            f"\nrelax: job {job.job_id} goes on. Follow it: python -m launchers.jobs follow {folder}. End it with a "
            f"checkpoint: python -m launchers.jobs stop {folder}",
            file=sys.stderr,
        )
        return INTERRUPTED


def execute_command(command: str, record: dict[str, Any]) -> int:
    """Executes a command of `python -m launchers.jobs` for a Ray job.

    ``record`` is the content of the job's job.json.
    """
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
        print(f"relax: job {job.job_id} was asked to end with a checkpoint")
    return 0


def _end(job: RayJob, info: Any) -> int:
    """Prints and returns the run's exit code. Ray's command line would return 1 for every failure."""
    code = STOPPED if info.status.value == "STOPPED" else info.driver_exit_code  # Ray keeps no code of a stopped job
    if code is None:
        print(f"relax: the run reported no exit code: {info.message}", file=sys.stderr)
        return FAILED
    code = code if code >= 0 else 128 - code  # a signal ended the run
    print(f"relax: the run ended with exit code {code}; its files are in {job.run_dir}", flush=True)
    return int(code)


def _client(job: RayJob) -> JobSubmissionClient:
    """Raises ConnectionError if no server answers, and RuntimeError if the token is missing or wrong."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        def _do_request(self, *arguments: Any, **options: Any) -> Any:
            answer = super()._do_request(*arguments, **{**options, "allow_redirects": False})
            if answer.is_redirect:  # token and variables may be sent only to this address
                raise ConnectionError(
                    f"launcher.address={job.address}: the server redirects the request, with status "
                    f"{answer.status_code}. Set the address that answers without a redirect."
                )
            return answer

    headers = None
    if job.token_file is not None:
        headers = {"Authorization": f"Bearer {Path(job.token_file).read_text().strip()}"}
    try:
        return Client(job.address, headers=headers)
    except AuthenticationError as error:
        key = f"launcher.token_file={'null' if job.token_file is None else job.token_file}"
        raise RuntimeError(f"{key}: {job.address} says: {_first_line(error)}. Name a file with its token.") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
