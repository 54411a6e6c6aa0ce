from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from launchers.local import run_folder, save_config
from relax_core.config.compose import load_config
from relax_core.config.schema import RelaxConfig


def config_for(folder: Path, **changes: str) -> RelaxConfig:
    return load_config([f"run.dir={folder}", *(f"{key}={value}" for key, value in changes.items())])


def test_a_fresh_run_never_enters_a_used_folder(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run")
    seen = []
    for _ in range(3):
        folder = run_folder(config)
        folder.mkdir()
        save_config(config, folder)
        seen.append(folder.name)
    assert seen == ["run", "run-2", "run-3"]


def test_resume_auto_finds_the_newest_folder_with_a_checkpoint(tmp_path: Path) -> None:
    config = config_for(tmp_path / "new", resume="auto")
    assert run_folder(config) == tmp_path / "new"
    checkpoint = tmp_path / "old" / "checkpoints" / "step_00000100"
    checkpoint.mkdir(parents=True)
    assert run_folder(config) == tmp_path / "new"
    (checkpoint / "meta.json").write_text("{}")
    assert run_folder(config) == tmp_path / "old"
    checkpoint.rename(checkpoint.with_name(".step_00000100.replaced"))  # killed while another took its place
    assert run_folder(config) == tmp_path / "old"


def test_config_of_a_resumed_run_keeps_the_earlier_one(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run")
    first = save_config(config, tmp_path).read_text()
    save_config(config, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"]
    save_config(replace(config, seed=9), tmp_path)
    assert (tmp_path / "config.1.yaml").read_text() == first
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["seed"] == 9
