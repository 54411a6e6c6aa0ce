"""Submits runs to Slurm through submitit: one job for one run, or one job array for the runs of a sweep."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers.slurm.follow import follow
from launchers.slurm.job_state import SlurmRun
from launchers.slurm.node_task import SlurmTask
from launchers.submitted import JOB_FILE, make_folder, write_atomically
from relax_core.config.launcher_checks import sbatch_arguments, script_path_problem
from relax_core.config.schema import RelaxConfig, SlurmLauncherConfig

if TYPE_CHECKING:
    from submitit import SlurmExecutor

USAGE = 2
ARRAY_PARALLELISM = 16  # limit of jobs of a sweep that run at the same time
FOLDER = "slurm"  # subfolder of the run's folder for the batch script, the job's output and Ray's logs


def launch(config: RelaxConfig) -> int:
    """Prints the batch script and submits it. With ``launcher.dry_run``, only prints it. Returns the exit code.

    With ``launcher.follow``, follows the run to its end and returns the run's exit code. Returns 0 if the run was only
    submitted or printed, and 2 if Slurm rejects the job.
    """
    launcher = launcher_of(config)
    if launcher.dry_run:
        print(script(config, Path(config.run.dir) / FOLDER, jobs=1))
        return 0
    try:
        (run,) = submit([config], [sys.argv[1:]])
    except (ValueError, OSError, RuntimeError) as error:
        print(f"relax: {error}", file=sys.stderr)
        return USAGE
    print(f"relax: job {run.job_id} in {run.run_dir}", flush=True)
    return follow(run) if launcher.follow else 0


def launcher_of(config: RelaxConfig) -> SlurmLauncherConfig:
    """Returns ``config.launcher`` with its type for launcher=slurm."""
    assert isinstance(config.launcher, SlurmLauncherConfig), "validated"
    return config.launcher


def submit(
    configs: Sequence[RelaxConfig], overrides: Sequence[Sequence[str]], *, folder: Path | None = None
) -> list[SlurmRun]:
    """Submits one job for one configuration, or one job array for several configurations with equal launchers.

    The files of a job array are in ``folder``. If Slurm rejects the job, removes the new folders and raises
    RuntimeError with Slurm's message.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    if shutil.which("sbatch") is None:
        raise RuntimeError("launcher=slurm: this machine has no sbatch. Submit on a login node of the cluster.")
    prepared: list[RelaxConfig] = []
    made: list[Path] = []
    try:
        for config, own_overrides in zip(configs, overrides, strict=True):
            existed = Path(config.run.dir).exists()
            prepared.append(make_folder(config, own_overrides))
            if not existed:
                made.append(Path(prepared[-1].run.dir))
        files = folder if folder is not None else Path(prepared[0].run.dir) / FOLDER
        print(script(prepared[0], files, jobs=len(prepared)), flush=True)
        executor = _executor(prepared[0], files)
        with executor.batch():
            jobs = [executor.submit(SlurmTask(config.run.dir)) for config in prepared]
        ids = [job.job_id for job in jobs]
    except (FailedJobError, FailedSubmissionError) as error:
        for path in made:
            shutil.rmtree(path)
        raise RuntimeError(f"Slurm did not take the job: {_slurm_error(error)}") from error
    runs = []
    for config, job_id in zip(prepared, ids, strict=True):
        run = SlurmRun(job_id=job_id, run_dir=Path(config.run.dir), output=files / f"{job_id}_0_log.out")
        record = {"launcher": "slurm", "job_id": job_id, "output": str(run.output)}
        write_atomically(run.run_dir / JOB_FILE, json.dumps(record))
        runs.append(run)
    return runs


def script(config: RelaxConfig, files: Path, *, jobs: int) -> str:
    """Returns submitit's batch script for one job, or for a job array of ``jobs`` jobs."""
    executor = _executor(config, files)
    if jobs > 1:
        executor.parameters["map_count"] = jobs
    return executor._make_submission_file_text(executor._submitit_command_str, "relax")


def _executor(config: RelaxConfig, files: Path) -> SlurmExecutor:
    from submitit import SlurmExecutor

    class Executor(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2  # allows a machine without Slurm to print the script

    launcher = launcher_of(config)
    if problem := script_path_problem("the folder of the sweep", str(files)):
        raise ValueError(problem)
    # The shell of the batch script splits this text into the original words.
    python = None if launcher.python is None else shlex.join(shlex.split(launcher.python))
    executor = Executor(files, python=python)
    executor.update_parameters(**_parameters(config, launcher))
    return executor


def _parameters(config: RelaxConfig, launcher: SlurmLauncherConfig) -> dict[str, Any]:
    """Returns submitit's parameters for the configuration. For None, the cluster's default is used."""
    optional = {
        "gpus_per_node": config.placement.gpus_per_node or None,
        "mem": None if launcher.memory_gb is None else f"{round(launcher.memory_gb * 1024)}M",
        "setup": launcher.setup or None,
    }
    return {
        "job_name": config.name,
        "nodes": launcher.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": launcher.cpus_per_node,
        "time": launcher.time_limit_min,
        "signal_delay_s": launcher.checkpoint_s,
        "array_parallelism": ARRAY_PARALLELISM,
        "stderr_to_stdout": True,
        "wckey": None,
        # A failed task ends the job, because a run on fewer nodes would be a different run.
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={launcher.cpus_per_node}", *launcher.srun],
        "additional_parameters": {"requeue": True} | sbatch_arguments(launcher.sbatch),
        **optional,
    }


def _slurm_error(error: Exception) -> str:
    """Returns the error line of sbatch from submitit's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line.split("error: ", 1)[1] for line in lines if "error: " in line]
    return "; ".join(errors) or lines[-1]
