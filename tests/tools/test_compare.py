from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.observe.event_log import EventWriter, read_metrics
from relax_core.tools.compare import (
    EXACT,
    EXACT_IN_TRAINING,
    PICTURE,
    REWARD,
    curves_of,
    drawn_runs,
    main,
    mean_curve,
    read_runs,
    spread_of,
)


def put_run(folder: Path, *, rewards: list[float], outcome: str = "finished", ended: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: x\n")
    writer = EventWriter(folder, "actor-0")
    for step, reward in enumerate(rewards):
        writer.record("actor", step, {"reward": reward, "exact": reward / 2})
    writer.record("eval", len(rewards), {"exact": 0.5, "rows": 4.0})
    writer.close()
    if ended:
        summary = {
            "outcome": outcome,
            "steps": len(rewards),
            "reward": {"last": rewards[-1]},
            "exact": {"last": rewards[-1] / 2},
            "eval": [{"exact": 0.5}],
            "samples_per_s": 1234.5,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_sweep_as_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [
        put_run(tmp_path / "runs" / "a", rewards=[0.1, 0.4]),
        put_run(tmp_path / "runs" / "b", rewards=[0.1, 0.9], outcome="failed: no such luck"),
        put_run(tmp_path / "runs" / "c", rewards=[0.1], ended=False),
    ]
    rows = [
        {"number": number, "overrides": ["run.steps=2", f"seed={number}"], "folder": str(folder), "job_id": None}
        for number, folder in enumerate(folders)
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": rows}))
    assert main([str(tmp_path)]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "outcome", "steps", "reward", "exact", "held-out", "exact", "samples/s"]
    assert lines[0].split() == ["seed=0", "finished", "2", "0.400", "0.200", "0.500*", "1,234*"]
    assert lines[1].split() == ["seed=1", "failed", "2", "0.900*", "0.450*", "0.500*", "1,234*"]
    assert lines[2].split() == ["seed=2", "not", "ended"]
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")


def test_seeds_have_their_mean_and_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = []
    for lr, seed, rewards in ((1, 0, [0.0, 0.2]), (1, 1, [0.2, 0.4]), (1, 2, [0.4, 0.9]), (2, 0, [0.1, 0.5])):
        folder = put_run(tmp_path / f"{lr}-{seed}", rewards=rewards)
        (folder / "config.yaml").write_text(f"name: x\nseed: {seed}\noptimizer: {{lr: {lr}}}\nrun: {{dir: {folder}}}\n")
        folders.append(folder)
    early = put_run(tmp_path / "1-3", rewards=[0.3], outcome="failed: the disk is full")
    (early / "config.yaml").write_text("name: x\nseed: 3\noptimizer: {lr: 1}\n")
    swept = [[f"optimizer.lr={folder.name[0]}", f"seed={folder.name[2]}"] for folder in [*folders, early]]
    rows = [{"overrides": words, "folder": str(folder)} for words, folder in zip(swept, [*folders, early], strict=True)]
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": rows}))
    assert main([str(tmp_path)]) == 0
    header, line = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert header.split()[:4] == ["over", "seeds", "finished", "reward"]
    # 0.2, 0.4, 0.9: mean 0.5, deviations -0.3, -0.1, 0.4, so the variance is (0.09 + 0.01 + 0.16) / 2 = 0.13
    assert " ".join(line.split()).startswith(
        "optimizer.lr=1 3 of 4 0.500 ± 0.361 0.250 ± 0.180 0.500 ± 0.000 1,234 ± 0"
    )
    first, second = drawn_runs(read_runs(tmp_path))
    assert (first.label, len(first.records)) == ("optimizer.lr=1, 3 seeds", 3)
    assert (second.label, len(second.records)) == ("optimizer.lr=2 seed=0", 1)
    assert main([*map(str, folders[:3]), "--picture", str(tmp_path / "seeds.png")]) == 0
    assert f"{tmp_path.name} 3 of 3 0.500 ± 0.361" in " ".join(capsys.readouterr().out.split())


def test_a_mean_curve_is_of_the_steps_that_all_have() -> None:
    curve = mean_curve([{0: 1.0, 1: 2.0, 2: 9.0}, {}, {0: 3.0, 1: 2.0}])
    assert list(curve) == [0, 1]
    assert (curve[0].mean, curve[0].std, curve[1].std) == (2.0, pytest.approx(2**0.5), 0.0)
    assert mean_curve([{}, {}]) == {} and spread_of([4.0]).std == 0.0


def test_refused_runs_are_listed_with_their_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = put_run(tmp_path / "a", rewards=[0.5])
    rows = [
        {"number": 0, "overrides": ["seed=1"], "folder": str(folder), "job_id": None, "code": 0, "cause": ""},
        {"number": 1, "overrides": ["seed=x"], "folder": None, "job_id": None, "code": 2, "cause": "seed=x: expected"},
        {"number": 2, "overrides": ["seed=3"], "folder": None, "job_id": None, "code": 130, "cause": "stopped before"},
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": rows}))
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[2:4]] == [["seed=x", "refused"], ["seed=3", "not", "started"]]
    assert "  seed=x: seed=x: expected" in lines


def test_runs_without_evaluation_show_their_training(tmp_path: Path) -> None:
    records = read_metrics(put_run(tmp_path / "one", rewards=[0.5]))
    assert curves_of([records]) == (REWARD, EXACT)
    trained = [record for record in records if record.source == "actor"]
    assert curves_of([trained, trained]) == (REWARD, EXACT_IN_TRAINING)
    assert curves_of([trained, records]) == (REWARD, EXACT)


def test_what_is_no_run_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "it has neither sweep.json nor config.yaml" in capsys.readouterr().err


def test_a_run_without_a_step_has_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "on_policy"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: x\n")
    assert main([str(folder)]) == 0
    assert "no step to draw yet" in capsys.readouterr().out
