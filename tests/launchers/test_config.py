"""Tests the checks of a launcher's configuration, and the files that a launcher writes for the run's machines."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path

import pytest
import yaml

import launchers
from launchers.saved_run import as_run_here
from launchers.submitted import CONFIG_FILE, RunEnd, make_folder, read_end, read_submitted, write_end
from relax_core.config.choices import LauncherKind
from relax_core.config.compose import config_from_yaml, load_config
from relax_core.config.errors import ConfigError
from relax_core.config.launcher_checks import sbatch_arguments
from relax_core.config.options import conf_folder, yaml_options
from relax_core.config.ranges import OF_LAUNCHER, RANGES
from relax_core.config.saved_config import to_yaml_with_secrets
from relax_core.config.schema import LAUNCHERS, LauncherConfig


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["launcher.max_requeues=5"], "launcher.max_requeues is a key of launcher=slurm only."),
        (["launcher=slurm", "launcher.address=x"], "launcher.address is a key of launcher=ray_job only."),
        (
            ["launcher=slurm", "launcher.max_requeue=1"],
            "launcher.max_requeue is not a key. Nearest: launcher.max_requeues",
        ),
        (["launcher=slurm", "launcher.nodes=two"], "launcher.nodes=two: expected a whole number."),
        (["launcher=slurm", "launcher.nodes=0"], "launcher.nodes=0: must be at least 1."),
        (["launcher=slurm", "launcher.max_requeues=-1"], "launcher.max_requeues=-1: must be at least 0."),
        (["launcher=slurm", "launcher.memory_gb=0"], "launcher.memory_gb=0.0: must be more than 0."),
        (["launcher=slurm", "launcher.ray_address=auto"], "launcher.ray_address=auto with launcher=slurm"),
        (["launcher=slurm", "launcher.time_limit_min=3"], "launcher.checkpoint_s=180 is not less than"),
        (["launcher=slurm", 'launcher.sbatch=["--mem=3G"]'], "'--mem=3G': use launcher.memory_gb."),
        (["launcher=slurm", 'launcher.sbatch=["--output=x"]'], "'--output=x', which Relax sets itself."),
        (["launcher=slurm", "launcher.sbatch=[exclusive]"], "'exclusive': write it as --name or --name=value."),
        (
            ["launcher=slurm", "launcher.nodes=2", "bus=transfer_queue"],
            "its sockets work only within one machine. Use bus=ray.",
        ),
        (["launcher.nodes=2"], "launcher.nodes=2 with a Ray that the run starts"),
        (["launcher.name=slurm"], "launcher.name=slurm: choose it with launcher=slurm."),
        (
            ["launcher=ray_job", "launcher.address=host:8265"],
            "launcher.address=host:8265: give the dashboard's address",
        ),
        (["launcher=ray_job", "launcher.env=[NAME]"], "launcher.env[0] is not NAME=value"),
        (["launcher=ray_job", "launcher.dry_run=true"], "launcher.dry_run=true needs launcher.image="),
    ],
)
def test_what_cannot_be_launched(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    assert text in "\n".join(caught.value.problems)


@pytest.mark.parametrize("name", sorted(LAUNCHERS))
def test_every_launcher_has_a_yaml_and_every_number_a_range(name: str) -> None:
    assert sorted(LAUNCHERS) == yaml_options("launcher") == sorted(kind.value for kind in LauncherKind)
    values = yaml.safe_load((conf_folder() / "launcher" / f"{name}.yaml").read_text())
    numbers = {f"launcher.{key}" for key, value in values.items() if type(value) in (int, float)}
    assert numbers <= set(RANGES) | set(OF_LAUNCHER[name])
    assert set(OF_LAUNCHER[name]) <= {f"launcher.{key}" for key in values}


def test_arguments_of_sbatch() -> None:
    assert sbatch_arguments(["--exclusive", "--reservation=a=b"]) == {"exclusive": True, "reservation": "a=b"}


@pytest.mark.parametrize(
    "overrides", [[], ["launcher=slurm", 'launcher.setup=["module load cuda"]'], ["launcher=ray_job"], ["algo=ppo"]]
)
def test_a_whole_configuration_comes_back_from_its_yaml(overrides: list[str]) -> None:
    config = load_config(["mode=colocate", *overrides])
    assert config_from_yaml(to_yaml_with_secrets(config)) == config


def test_a_submitted_run_is_what_it_was_and_for_this_user_only(tmp_path: Path) -> None:
    config = load_config(["launcher=slurm", "launcher.nodes=2", "seed=7", f"run.dir={tmp_path}/run"])
    placed = make_folder(config, ["seed=7"])
    file = tmp_path / "run" / CONFIG_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again, overrides = read_submitted(file.read_text())
    assert (again, overrides) == (placed, ["seed=7"])
    assert make_folder(config, []).run.dir == f"{tmp_path}/run-2", "a new run never enters a used folder"
    here = as_run_here(again, ray_address="10.0.0.1:6379")
    assert (here.launcher.name, here.launcher.nodes, here.seed) == (LauncherKind.local, 2, 7)
    assert as_run_here(again, ray_address=None).launcher.nodes == 1


def test_a_mistyped_submitted_file_is_the_users_error() -> None:
    text = to_yaml_with_secrets(load_config(["launcher=slurm"]))
    with pytest.raises(ConfigError, match=r"run\.steps=many: expected a whole number"):
        config_from_yaml(text.replace("steps: 320", "steps: many"))


def test_the_end_of_a_run_is_read_back(tmp_path: Path) -> None:
    assert read_end(tmp_path) is None
    end = RunEnd(code=143, cause="Slurm stopped it", attempt="12_3-r1")
    write_end(tmp_path, end)
    assert read_end(tmp_path) == end


def test_every_key_of_a_launcher_is_read() -> None:
    source = "".join(file.read_text() for file in Path(launchers.__file__).parent.rglob("*.py"))
    keys = {field.name for launcher in LAUNCHERS.values() for field in dataclasses.fields(launcher)}
    shared = {field.name for field in dataclasses.fields(LauncherConfig)}  # checked in tests/test_imports.py
    assert [key for key in sorted(keys - shared) if f"launcher.{key}" not in source] == []
