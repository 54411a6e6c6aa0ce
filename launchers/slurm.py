"""launcher=slurm: one job = one Ray cluster of its nodes = one run. Submission through submitit."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers.slurm_task import SlurmTask
from launchers.submitted import JOB_FILE, make_folder, put
from relax_core.config.checks.launcher_keys import sbatch_arguments
from relax_core.config.schema import RelaxConfig, SlurmLauncherConfig

if TYPE_CHECKING:
    from submitit import SlurmExecutor

USAGE = 2
FOLDER = "slurm"  # below the run's folder: script, output, logs of Ray


@dataclass(frozen=True, kw_only=True)
class SlurmRun:
    """A run that was submitted. ``output``: what its first task prints."""

    job_id: str
    run_dir: Path
    output: Path


def launch(config: RelaxConfig) -> int:
    """Prints the batch script and submits it; then follows the run to its end, or not (``launcher.follow``). Returns
    the exit code: the run's own, 0 where it was only submitted, or 2 where Slurm did not take it."""
    from launchers.slurm_follow import follow

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
    assert isinstance(config.launcher, SlurmLauncherConfig), "validated"
    return config.launcher


def submit(
    configs: Sequence[RelaxConfig], overrides: Sequence[Sequence[str]], *, folder: Path | None = None
) -> list[SlurmRun]:
    """Submits one job for each configuration; several, which must agree in their launcher, as one job array with its
    files in ``folder``. Raises RuntimeError with Slurm's words where it refuses; nothing is left of them then."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    if shutil.which("sbatch") is None:
        raise RuntimeError("launcher=slurm: there is no sbatch here. Submit on a login node of the cluster.")
    placed: list[RelaxConfig] = []
    made: list[Path] = []
    try:
        for config, words in zip(configs, overrides, strict=True):
            existed = Path(config.run.dir).exists()
            placed.append(make_folder(config, words))
            if not existed:
                made.append(Path(placed[-1].run.dir))
        files = folder if folder is not None else Path(placed[0].run.dir) / FOLDER
        print(script(placed[0], files, jobs=len(placed)), flush=True)
        executor = _executor(placed[0], files)
        with executor.batch():
            jobs = [executor.submit(SlurmTask(config.run.dir)) for config in placed]
        ids = [job.job_id for job in jobs]
    except (FailedJobError, FailedSubmissionError) as error:
        for one in made:
            shutil.rmtree(one)
        raise RuntimeError(f"Slurm did not take the job: {_slurms_words(error)}") from error
    runs = []
    for config, job_id in zip(placed, ids, strict=True):
        run = SlurmRun(job_id=job_id, run_dir=Path(config.run.dir), output=files / f"{job_id}_0_log.out")
        put(run.run_dir / JOB_FILE, json.dumps({"launcher": "slurm", "job_id": job_id, "output": str(run.output)}))
        runs.append(run)
    return runs


def script(config: RelaxConfig, files: Path, *, jobs: int) -> str:
    """The batch script as submitit writes it."""
    executor = _executor(config, files)
    if jobs > 1:
        executor.parameters["map_count"] = jobs
    return executor._make_submission_file_text(executor._submitit_command_str, "relax")


def _executor(config: RelaxConfig, files: Path) -> SlurmExecutor:
    from submitit import SlurmExecutor

    class Executor(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2  # a script can be printed where there is no Slurm

    launcher = launcher_of(config)
    executor = Executor(files, python=launcher.python)
    executor.update_parameters(**_parameters(config, launcher))
    return executor


def _parameters(config: RelaxConfig, launcher: SlurmLauncherConfig) -> dict[str, Any]:
    """submitit's words for what the configuration says; what is None is left to the cluster."""
    optional = {
        "partition": launcher.partition,
        "account": launcher.account,
        "qos": launcher.qos,
        "constraint": launcher.constraint,
        "gpus_per_node": launcher.gpus_per_node or None,
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
        "array_parallelism": launcher.array_parallelism,
        "stderr_to_stdout": True,
        "wckey": None,
        # One task that ends badly ends the job: a run on fewer nodes is another run.
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={launcher.cpus_per_node}", *launcher.srun],
        "additional_parameters": {"requeue": True} | sbatch_arguments(launcher.sbatch),
        **optional,
    }


def _slurms_words(error: Exception) -> str:
    """sbatch's own error line out of submitit's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line.split("error: ", 1)[1] for line in lines if "error: " in line]
    return "; ".join(said) or lines[-1]
