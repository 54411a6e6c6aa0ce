"""Tests runs in a real Slurm: over two nodes, in a job array, and with each possible end of a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.integration.training_gate import TrainingGate
from tests.slurm.cluster import Cluster
from tests.slurm.submitted import FAST, ROOT, Submitted

LONG = "run.steps=1000000"  # longer than any test waits


def relax(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=cluster.environment, capture_output=True, text=True, timeout=600)


def task_of(cluster: Cluster, words: str) -> int:
    """Returns the Slurm task of the process with these words in its command line. Each node has one task."""
    (pid,) = (pid for pid, line in cluster.processes().items() if words in line)
    return rank_of(pid)


def rank_of(pid: int) -> int:
    variables = dict(
        word.split(b"=", 1) for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in word
    )
    return int(variables[b"SLURM_PROCID"])


REWARD = """
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardSpec


def score(given: RewardInput, config: RewardConfig) -> float:
    for number, item in enumerate(given.media):
        frames = given.frames(number)
        if frames.shape[0] != max(1, item.frames) or frames.flags.writeable:
            raise ValueError(f"{item.words} has frames of shape {frames.shape}")
    return float(given.response == given.answer)


SPEC = RewardSpec(name="looks", summary="looks at the pixels", config=RewardConfig, score=score, isolated=True)
"""


def test_a_run_over_two_nodes(quiet: Cluster, tmp_path: Path) -> None:
    """A run with images and videos. Engine and trainer, on different nodes, and the reward's worker map files."""
    held = TrainingGate(tmp_path, updates=3)
    (tmp_path / "looks.py").write_text(REWARD)
    overrides = (
        *("launcher.nodes=2", "run.steps=6", "run.export_hf=true", "model=tiny_qwen3_vl", "data=see"),
        *(f"reward.name={tmp_path / 'looks.py'}", "rollout.prompts_per_step=6", "algo.group_size=4"),
    )
    run = Submitted(quiet, tmp_path / "run", *overrides, *held.overrides)
    run.wait_step(0)
    assert {task_of(quiet, "relax_core.engines.embedded"), task_of(quiet, "ray::PolicyTrainer")} == {0, 1}
    held.let_go()
    code, output = run.finish()
    assert code == 0, output
    assert "running on n[1-2]" in output and "the run ended with exit code 0" in output
    assert "#SBATCH --nodes=2" in output, "the script is printed before it is submitted"
    assert run.summary()["outcome"] == "finished" and run.steps() == list(range(6))
    books = run.summary()["ledger"]
    assert books["lost"] == books["trained_twice"] == 0 and books["dropped"] == {}
    assert 0.0 < run.summary()["logprob_gap"]["max"] <= 2e-5, "engine and trainer read the same pixels"
    assert (run.folder / "hf" / "model.safetensors").is_file()
    assert not list(run.folder.glob("relax-*")), "weights were published in the run's folder and were not removed"


def test_a_sweep_is_one_array_and_returns_at_once(quiet: Cluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    common = ["launcher=slurm", *FAST, "run.steps=4", f"hydra.sweep.dir={sweep}", f"run.dir={tmp_path}/runs/one"]
    done = relax(quiet, "relax_core", "-m", *common, "seed=1,2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((sweep / "sweep.json").read_text())["runs"]
    assert [row["job_id"].split("_")[1] for row in rows] == ["0", "1"]
    assert len({row["job_id"].split("_")[0] for row in rows}) == 1 and "#SBATCH --array=0-1" in done.stdout
    assert len({row["folder"] for row in rows}) == 2
    for row in rows:
        assert row["job_id"] in done.stdout and row["folder"] in done.stdout
        followed = relax(quiet, "launchers.jobs", "follow", row["folder"])
        assert followed.returncode == 0, followed.stdout + followed.stderr
        assert f"seed: {row['overrides'][-1].split('=')[1]}" in (Path(row["folder"]) / "config.yaml").read_text()
    compared = relax(quiet, "relax_core.tools.compare", str(sweep))
    assert compared.returncode == 0 and "seed=1" in compared.stdout and (sweep / "compare.png").is_file()


def test_preempted_it_goes_on_from_its_checkpoint(quiet: Cluster, tmp_path: Path) -> None:
    held = TrainingGate(tmp_path, updates=16)
    overrides = ("launcher.nodes=2", "run.steps=32", "run.save_every=0")
    run = Submitted(quiet, tmp_path / "run", *overrides, *held.overrides)
    run.wait_step(4)
    quiet.call("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    run.wait_stop_received()
    held.let_go()
    run.start_again()
    code, output = run.finish()
    assert code == 0, output
    assert "the job is queued again" in output and "started again 1 times" in output
    steps = run.steps()
    assert sorted(steps) == list(range(32)), "every step runs once: the checkpoint has the last one before the stop"
    assert run.summary()["outcome"] == "finished" and run.summary()["ledger"]["lost"] == 0


def test_the_time_limit_queues_it_again_until_that_is_too_often(quiet: Cluster, tmp_path: Path) -> None:
    limits = ("launcher.time_limit_min=60", "launcher.checkpoint_s=80", "launcher.max_requeues=0")
    began = time.monotonic()
    run = Submitted(quiet, tmp_path / "run", LONG, "run.save_every=0", *limits)
    run.wait_step(3)
    minutes = int(time.monotonic() - began) // 60 + 2  # a time between one and two minutes from now
    quiet.call("scontrol", "update", f"jobid={run.job_id()}", f"TimeLimit={minutes}")
    code, output = run.finish()
    assert code == 128 + signal.SIGTERM, output
    assert "Slurm stopped it again (launcher.max_requeues=0)" in output
    (checkpoint,) = run.checkpoints()
    assert checkpoint == len(run.steps()) > 0


def test_scancel(quiet: Cluster, tmp_path: Path) -> None:
    run = Submitted(quiet, tmp_path / "run", "launcher.nodes=2", LONG)
    run.wait_step(3)
    quiet.call("scancel", run.job_id())
    code, output = run.finish()
    assert code == 1 and "was cancelled" in output and "reported no exit code" in output, output


def test_stop_ends_it_with_a_checkpoint(quiet: Cluster, tmp_path: Path) -> None:
    run = Submitted(quiet, tmp_path / "run", LONG, "run.save_every=0")
    run.wait_step(3)
    done = relax(quiet, "launchers.jobs", "stop", str(run.folder))
    assert done.returncode == 0 and "with a checkpoint" in done.stdout, done.stdout + done.stderr
    code, output = run.finish()
    assert code == 128 + signal.SIGTERM and "the run ended with exit code 143" in output, output
    assert run.checkpoints() == [len(run.steps())]


def test_a_lost_node_ends_the_job_and_is_named(quiet: Cluster, tmp_path: Path) -> None:
    run = Submitted(quiet, tmp_path / "run", "launcher.nodes=2", LONG)
    run.wait_step(3)
    (lost,) = (pid for pid, line in quiet.processes().items() if "raylet/raylet " in line and rank_of(pid) == 1)
    os.kill(lost, signal.SIGKILL)
    code, output = run.finish()
    assert code == 1, output
    assert "n2: its Ray node ended" in output and "resume=auto" in output


def test_a_lost_task_ends_the_job(quiet: Cluster, tmp_path: Path) -> None:
    run = Submitted(quiet, tmp_path / "run", "launcher.nodes=2", LONG)
    run.wait_step(3)
    tasks = [pid for pid, line in quiet.processes().items() if "submitit.core._submit" in line and "srun" not in line]
    (lost,) = (pid for pid in tasks if rank_of(pid) == 1)
    os.kill(lost, signal.SIGKILL)
    code, output = run.finish()
    assert code == 1 and "reported no exit code" in output, output
    quiet.wait_empty()
    # The folder of a killed task is removed when the next job starts on its node.
    after = Submitted(quiet, tmp_path / "after", "run.steps=1", "launcher.nodes=2")
    assert after.finish()[0] == 0


def test_a_run_that_fails_says_why(quiet: Cluster, tmp_path: Path) -> None:
    reward = tmp_path / "broken.py"
    reward.write_text(BROKEN_REWARD)
    run = Submitted(quiet, tmp_path / "run", "run.steps=20", f"reward.name={reward}", "run.max_recoveries=0")
    code, output = run.finish()
    assert code == 1 and "the run ended with exit code 1" in output, output
    assert "no such luck" in output


def test_a_bad_partition_is_slurms_own_words_and_leaves_nothing(quiet: Cluster, tmp_path: Path) -> None:
    code, output = Submitted(quiet, tmp_path / "run", 'launcher.sbatch=["--partition=nonsense"]').finish()
    assert code == 2 and "relax: Slurm did not take the job: " in output and "invalid partition" in output, output
    assert "Traceback" not in output and not (tmp_path / "run").exists()


def test_a_full_queue_is_reported_and_ctrl_c_leaves_the_job(quiet: Cluster, tmp_path: Path) -> None:
    quiet.call("sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
    run = Submitted(quiet, tmp_path / "run", LONG)
    job = run.job_id()
    run.wait_for("its place in the queue", lambda: "Reason=Resources" in quiet.call("scontrol", "show", "job", job))
    status = relax(quiet, "launchers.jobs", "status", str(run.folder))
    assert f"job {job} waits in the queue (Resources)" in status.stdout, status.stdout + status.stderr
    run.interrupt()
    code, output = run.finish()
    assert code == 130 and f"job {job} goes on." in output and f"scancel {job}" in output, output
    assert job in quiet.call("squeue", "--noheader", "--format=%A")


def test_a_dry_run_submits_nothing(quiet: Cluster, tmp_path: Path) -> None:
    code, output = Submitted(
        quiet, tmp_path / "run", "launcher.dry_run=true", 'launcher.sbatch=["--constraint=h100"]'
    ).finish()
    assert code == 0 and "#SBATCH --constraint=h100" in output, output
    assert not (tmp_path / "run").exists() and quiet.call("squeue", "--noheader") == ""


BROKEN_REWARD = """
import sys
from dataclasses import dataclass

from relax_core.contracts.reward import RewardConfig, RewardSpec


@dataclass(frozen=True)
class BrokenConfig(RewardConfig):
    name: str = "broken"
    timeout_s: float = 1.0


def score(given, config):
    if "relax_core.rollout.trial.plugin_trial_main" in sys.orig_argv:
        return 0.0
    raise RuntimeError("no such luck")


SPEC = RewardSpec(name="broken", summary="raises", config=BrokenConfig, score=score)
"""
