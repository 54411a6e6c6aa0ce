"""Tests the batch script and the parsing of Slurm's output, without Slurm. tests/slurm has tests with a real Slurm."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from launchers.slurm.follow import Output
from launchers.slurm.job_state import JobState, job_state
from launchers.slurm.sbatch import script
from launchers.slurm.task_identity import TaskIdentity
from relax_core.__main__ import main
from relax_core.config.compose import load_config


def lines_of(*overrides: str, jobs: int = 1) -> list[str]:
    config = load_config(["launcher=slurm", *overrides])
    return script(config, Path("/shared/run one/slurm"), jobs=jobs).splitlines()


def test_the_script_says_what_the_configuration_says() -> None:
    lines = lines_of(
        "launcher.nodes=4",
        "placement.gpus_per_node=8",
        "launcher.cpus_per_node=96",
        "launcher.memory_gb=1.5",
        "launcher.time_limit_min=90",
        "launcher.checkpoint_s=240",
        'launcher.sbatch=["--partition=gpu","--exclusive","--reservation=mine","--account=me","--qos=high","--constraint=h100&nvlink"]',
        'launcher.srun=["--container-image=/images/relax.sqsh"]',
        'launcher.setup=["module load cuda"]',
        "launcher.python=apptainer exec x.sif python",
        "name=demo",
    )
    asked = "nodes=4 ntasks-per-node=1 partition=gpu account=me qos=high gpus-per-node=8 cpus-per-task=96 mem=1536M"
    further = "time=90 signal=USR2@240 reservation=mine job-name=demo open-mode=append"
    assert {f"#SBATCH --{wanted}" for wanted in f"{asked} {further}".split()} <= set(lines)
    assert "#SBATCH --exclusive" in lines and "#SBATCH --requeue" in lines
    assert "#SBATCH --constraint='h100&nvlink'" in lines
    assert not [line for line in lines if "wckey" in line or "array" in line]
    assert lines.index("module load cuda") < len(lines) - 1
    srun = next(shlex.split(line) for line in lines if line.startswith("srun "))
    assert "--kill-on-bad-exit=1" in srun and "--container-image=/images/relax.sqsh" in srun
    assert srun[-5:] == ["python", "-u", "-m", "submitit.core._submit", "/shared/run one/slurm"]


def test_what_is_null_is_left_to_the_cluster() -> None:
    text = "\n".join(lines_of())
    for absent in ("partition", "account", "qos", "constraint", "mem", "gpus", "exclusive"):
        assert f"#SBATCH --{absent}" not in text


def test_a_sweep_is_an_array() -> None:
    assert "#SBATCH --array=0-4%5" in lines_of(jobs=5)


def test_a_dry_run_needs_no_slurm_and_without_slurm_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    overrides = ["launcher=slurm", f"run.dir={tmp_path}/run"]
    assert main([*overrides, "launcher.dry_run=true"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash")
    assert main(overrides) == 2
    refused = capsys.readouterr().err
    assert refused == "relax: launcher=slurm: this machine has no sbatch. Submit on a login node of the cluster.\n"
    assert list(tmp_path.iterdir()) == []


def write_command(folder: Path, name: str, text: str) -> None:
    """Writes a fake command that prints the same output as Slurm's command on a cluster."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("sacct", "state"),
    [
        ("echo 'CANCELLED by 1000|n[1-2]'", JobState(state="CANCELLED", nodes="n[1-2]")),
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", JobState(state="UNKNOWN")),
    ],
)
def test_a_job_that_the_controller_has_forgotten(
    sacct: str, state: JobState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_command(tmp_path, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    write_command(tmp_path, "sacct", sacct)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert job_state("12") == state and state.ended


def test_a_controller_that_does_not_answer_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_command(tmp_path, "scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(RuntimeError, match="Unable to contact slurm controller"):
        job_state("12")


def test_states_in_words() -> None:
    assert JobState(state="PENDING", reason="Priority").describe() == "waits in the queue (Priority)"
    assert JobState(state="RUNNING", nodes="n1", restarts=2).describe() == "running on n1, started again 2 times"
    assert JobState(state="TIMEOUT").describe() == "reached its time limit"


def test_identity_of_a_task_in_a_job_array(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_JOB_ID": "15",
        "SLURM_ARRAY_JOB_ID": "12",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_PROCID": "0",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURMD_NODENAME": "n1",
        "SLURM_RESTART_COUNT": "2",
    }.items():
        monkeypatch.setenv(name, value)
    identity = TaskIdentity.of_environment()
    assert (identity.job_id, identity.raw_job_id, identity.attempt) == ("12_3", "15", "12_3-r2")


def test_output_is_shown_once_line_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out"
    output = Output(file)
    output.show()
    file.write_text("submitit INFO\nstep 1\nstep")
    output.show()
    file.write_text("submitit INFO\nstep 1\nstep 2\n")
    output.show()
    file.write_text("new\n")  # the job was queued again
    output.show()
    assert capsys.readouterr().out == "  step 1\n  step 2\n  new\n"
