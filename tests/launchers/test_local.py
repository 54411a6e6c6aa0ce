from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from launchers.local import launch, make_run_folder, save_config
from relax_core.config.compose import load_config
from relax_core.config.schema import DtypeByMachine, RelaxConfig
from relax_core.control.resume import ResumePoint
from relax_core.data.chat_template import utc_date

BY_TIME = "${now:%Y}"


def config_for(folder: Path | str, **changes: str) -> RelaxConfig:
    return load_config([f"run.dir={folder}", *(f"{key}={value}" for key, value in changes.items())])


def with_checkpoint(folder: Path) -> Path:
    (folder / "checkpoints" / "step_00000100").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000100" / "meta.json").write_text("{}")
    return folder


def test_a_fresh_run_never_enters_a_used_folder(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run")
    seen = []
    for _ in range(3):
        folder = make_run_folder(config)
        save_config(config, folder)
        seen.append(folder.name)
    assert seen == ["run", "run-2", "run-3"]


def test_a_fresh_run_takes_a_folder_that_its_user_has_made(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert make_run_folder(config_for(tmp_path / "run")) == tmp_path / "run"


def test_resume_auto_looks_in_the_folder_that_was_named_and_nowhere_else(tmp_path: Path) -> None:
    with_checkpoint(tmp_path / "other")
    config = config_for(tmp_path / "new", resume="auto")
    assert make_run_folder(config) == tmp_path / "new"
    save_config(config, tmp_path / "new")
    assert make_run_folder(config) == tmp_path / "new"  # a new start after a preemption without checkpoints


def test_resume_auto_finds_the_newest_folder_of_those_that_the_time_names(tmp_path: Path) -> None:
    config = config_for(f"{tmp_path}/runs/{BY_TIME}", resume="auto")
    on_policy = make_run_folder(config)
    assert on_policy.parent == tmp_path / "runs"
    old = with_checkpoint(tmp_path / "runs" / "old")
    assert make_run_folder(config) == old
    newest = with_checkpoint(tmp_path / "runs" / "newest")
    os.utime(old, (1, 1))
    assert make_run_folder(config) == newest
    checkpoint = newest / "checkpoints" / "step_00000100"
    checkpoint.rename(checkpoint.with_name(".step_00000100.replaced"))  # killed during the replacement
    assert make_run_folder(config) == newest


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    config = config_for(f"{tmp_path}/{BY_TIME}")
    first, second = make_run_folder(config), make_run_folder(config)
    assert second == first.with_name(f"{first.name}-2")
    third = first.with_name(f"{first.name}-3")

    def another_is_faster(frame: object, event: str, function: object) -> None:
        if event == "c_call" and function is os.mkdir and not third.exists():
            third.mkdir()

    sys.setprofile(another_is_faster)
    try:
        fourth = make_run_folder(config)
    finally:
        sys.setprofile(None)
    assert third.is_dir() and fourth == first.with_name(f"{first.name}-4")


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/dev/null/x"])
def test_a_folder_that_cannot_be_made_is_reported_with_its_key(folder: str) -> None:
    with pytest.raises(ValueError, match=rf"run\.dir={folder} cannot be made: .*\. Choose another folder\."):
        make_run_folder(_unchecked(folder))


def _unchecked(folder: str) -> RelaxConfig:
    config = load_config([])
    return replace(config, run=replace(config.run, dir=folder))


def test_config_of_a_resumed_run_keeps_the_earlier_one(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run")
    first = save_config(config, tmp_path).read_text()
    save_config(config, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"]
    save_config(replace(config, seed=9), tmp_path)
    assert (tmp_path / "config.1.yaml").read_text() == first
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["seed"] == 9


@pytest.mark.parametrize("saved", [None, "2026-01-02"])
def test_the_run_has_the_date_of_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str | None
) -> None:
    config, seen = config_for(tmp_path / "run", resume="auto"), []
    point = None if saved is None else ResumePoint(folder=tmp_path, step=1, snapshot=b"", template_date=saved)
    monkeypatch.setattr("relax_core.control.resume.find_resume_point", lambda config: point)
    monkeypatch.setattr("relax_core.control.supervisor.supervise", lambda config, resume, run: seen.append(config) or 0)
    before = datetime.now(UTC).date().isoformat()
    assert launch(config) == 0
    found = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]["template_date"]
    assert found == seen[0].data.template_date and found in ((saved,) if saved else (before, utc_date()))


@pytest.mark.parametrize("saved", [None, "bfloat16"])
def test_a_resumed_run_keeps_the_dtype_that_auto_chose_at_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str | None
) -> None:
    """The current machine would choose another dtype. Serializers of the run do not know the class of the choice."""
    config, seen = config_for(tmp_path / "run", resume="auto"), []
    config.model.dtype = DtypeByMachine("float32")
    point = None if saved is None else ResumePoint(folder=tmp_path, step=1, snapshot=b"", dtype=saved)
    monkeypatch.setattr("relax_core.control.resume.find_resume_point", lambda config: point)
    monkeypatch.setattr("relax_core.control.supervisor.supervise", lambda config, resume, run: seen.append(config) or 0)
    assert launch(config) == 0
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["dtype"]
    assert kept == seen[0].model.dtype == (saved or "float32") and type(seen[0].model.dtype) is str
