"""Tests sweeps on this machine, and the run metrics that a sweeper optimizes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from launchers.local import save_config
from launchers.sweep import SWEEP_FILE, Sweep, _label, read_metric
from relax_core.config import compose
from relax_core.config.schema import RelaxConfig
from relax_core.observe.event_log import EventWriter


def record(config: RelaxConfig) -> int:
    """Writes the files of a run. The run with seed 3 fails."""
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    save_config(config, folder)
    values = {
        "outcome": "finished",
        "steps": 1,
        "reward": {"first": 0.0, "last": config.seed / 10},
        "exact": {"first": 0.0, "last": 0.0},
        "eval": [{"step": 0, "exact": 0.25, "reward": 0.5, "rows": 4}],
        "samples_per_s": 100.0 * config.seed,
    }
    (folder / "summary.json").write_text(json.dumps(values))
    writer = EventWriter(folder, "actor-0")
    writer.record("actor", 0, {"reward": config.seed / 10, "exact": 0.0})
    writer.close()
    return 1 if config.seed == 3 else 0


def sweep(folder: Path, *words: str) -> int:
    common = [f"hydra.sweep.dir={folder}/sweep", f"run.dir={folder}/runs/${{seed}}"]
    return compose.run(["-m", *common, *words], record, sweep=Sweep(record))


def test_runs_here_end_with_their_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(tmp_path, "seed=1,2") == 0
    rows = json.loads((tmp_path / "sweep" / SWEEP_FILE).read_text())["runs"]
    assert [row["folder"] for row in rows] == [f"{tmp_path}/runs/1", f"{tmp_path}/runs/2"]
    printed = capsys.readouterr().out
    assert "seed=2" in printed and "0.200*" in printed and "0.100 " in printed
    assert (tmp_path / "sweep" / "compare.png").is_file()


def test_a_sweep_is_validated_as_a_whole_before_its_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(tmp_path, "seed=1,2", "rollout.temperature=1,0", "algo=grpo,grop") == 2
    assert not (tmp_path / "runs").exists()
    assert "algo=grop does not exist. Nearest: grpo." in capsys.readouterr().err
    shutil.rmtree(tmp_path / "sweep")
    assert sweep(tmp_path, "seed=1,2", "rollout.temperature=1,0,-1") == 2
    reported = capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    for words in ("seed=1 rollout.temperature=0", "seed=2 rollout.temperature=-1"):
        assert f"relax: run {words} of the sweep is refused" in reported
    assert reported.count("rollout.temperature=0.0: must be at least 1e-06") == 2
    assert reported.endswith("relax: 4 of the sweep's 6 runs are refused, so none was started\n")


def test_a_plan_that_cannot_work_refuses_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = "engine.max_total_tokens=1000000000000"
    assert sweep(tmp_path, "seed=1", large, "engine.max_running_samples=16,1000000000") == 2
    assert "too little memory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_batch_of_a_sweeper_is_validated_before_its_first_run(tmp_path: Path) -> None:
    assert sweep(tmp_path, "hydra/launcher=relax", "rollout.temperature=1,0") == 1
    assert not (tmp_path / "runs").exists()


def test_folders_of_a_sweep_carry_its_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-m", "name=x", "optimizer.lr=1e-3", "seed=1,2"]
    assert compose.run(words, record, sweep=Sweep(record)) == 0
    names = sorted(folder.name.split("_", 2)[2] for folder in (tmp_path / "runs" / "x").iterdir())
    assert names == ["seed=1", "seed=2"]
    (index,) = (tmp_path / "multirun").glob("*/sweep.json")
    rows = json.loads(index.read_text())["runs"]
    assert [Path(row["folder"]).is_dir() for row in rows] == [True] * 2
    words = ["-m", f"hydra.sweep.dir={tmp_path}/s", f"run.dir={tmp_path}/same", "seed=5,6"]
    assert compose.run(words, record, sweep=Sweep(record)) == 0
    assert (tmp_path / "same_seed=5" / "summary.json").is_file() and (tmp_path / "same_seed=6").is_dir()


def test_the_overrides_of_a_long_line_make_no_name_that_is_too_long() -> None:
    assert _label([]) == "" and _label(["seed=1", "data.path='/a b/c'"]) == "_seed=1,data.path=-a-b-c-"
    long = [f"data.prompt_key={'x' * 300}{end}" for end in "ab"]
    assert (
        len({_label([override]) for override in long}) == 2 and max(len(_label([override])) for override in long) < 120
    )


def test_a_sweep_goes_on_where_each_of_its_runs_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-m", "name=x", "seed=1,2", "resume=auto"]
    assert compose.run(words, record, sweep=Sweep(record)) == 0
    first = sorted((tmp_path / "runs" / "x").iterdir())
    for folder in first:
        (folder / "checkpoints" / "step_00000001").mkdir(parents=True)
        (folder / "checkpoints" / "step_00000001" / "meta.json").write_text("{}")
    assert compose.run(words, record, sweep=Sweep(record)) == 0
    assert sorted((tmp_path / "runs" / "x").iterdir()) == first
    rows = json.loads(max((tmp_path / "multirun").glob("*/sweep.json"), key=os.path.getmtime).read_text())["runs"]
    assert [row["folder"].endswith(row["overrides"][1]) for row in rows] == [True, True], rows


def test_a_run_that_is_refused_at_its_start_is_compared_as_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse_two(config: RelaxConfig) -> int:
        return 2 if config.seed == 2 else record(config)

    overrides = ["-m", f"hydra.sweep.dir={tmp_path}/sweep", f"run.dir={tmp_path}/runs/${{seed}}", "seed=1,2,4"]
    assert compose.run(overrides, refuse_two, sweep=Sweep(refuse_two)) == 2
    printed = capsys.readouterr().out
    assert "seed=2  refused" in printed and "seed=2: refused at its start" in printed
    assert not (tmp_path / "runs" / "2").exists()


def test_a_run_here_knows_its_own_overrides(tmp_path: Path) -> None:
    reported: list[list[str]] = []

    def tell(config: RelaxConfig) -> int:
        reported.append(sys.argv[1:])
        return 0

    before = list(sys.argv)
    overrides = ["-m", f"hydra.sweep.dir={tmp_path}/sweep", f"run.dir={tmp_path}/run", "seed=1,2"]
    assert compose.run(overrides, tell, sweep=Sweep(tell)) == 0
    assert reported == [[f"run.dir={tmp_path}/run", "seed=1"], [f"run.dir={tmp_path}/run", "seed=2"]]
    assert sys.argv == before


def test_a_failed_run_is_the_sweeps_exit_code(tmp_path: Path) -> None:
    assert sweep(tmp_path, "seed=3,1") == 1


def test_a_stopped_run_is_the_sweeps_last(tmp_path: Path) -> None:
    started: list[int] = []

    def stopped(config: RelaxConfig) -> int:
        started.append(config.seed)
        return 130

    overrides = ["-m", f"hydra.sweep.dir={tmp_path}/sweep", f"run.dir={tmp_path}/run", "seed=1,2,3"]
    assert compose.run(overrides, stopped, sweep=Sweep(stopped)) == 130
    assert started == [1]


def test_the_relax_launcher_gives_the_sweeper_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    seen: list[object] = []
    whole = BasicSweeper.sweep

    def spy(self: BasicSweeper, arguments: list[str]) -> object:
        returns = whole(self, arguments)
        seen.extend(job.return_value for batch in returns for job in batch)
        return returns

    monkeypatch.setattr(BasicSweeper, "sweep", spy)
    assert sweep(tmp_path, "hydra/launcher=relax", "seed=1,2") == 0
    assert seen == [0.1, 0.2]
    assert sweep(tmp_path / "other", "hydra/launcher=relax", "hydra.launcher.metric=samples_per_s", "seed=5") == 0
    assert seen[2:] == [500.0]


def test_a_failed_run_has_no_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(tmp_path, "hydra/launcher=relax", "seed=1,3") == 1
    assert f"relax: the sweep ends: the run in {tmp_path}/runs/3 failed" in capsys.readouterr().err


def test_metrics_of_a_summary(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"reward": {"last": None}, "eval": [{"exact": 1.0}]}))
    assert read_metric(tmp_path, "reward.last") is None
    assert read_metric(tmp_path, "eval.-1.exact") == 1.0
    for metric in ("eval.1.exact", "nonsense", "reward.last.x", "reward"):
        with pytest.raises(ValueError, match=r"hydra\.launcher\.metric="):
            read_metric(tmp_path, metric)
