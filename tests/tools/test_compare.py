from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.observe.sinks import read_metrics
from relax_core.tools.compare import EXACT, EXACT_IN_TRAINING, PICTURE, REWARD, curves_of, main, read_runs, table


def put_run(folder: Path, *, rewards: list[float], outcome: str = "finished", ended: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: x\n")
    records = [
        {"source": "actor", "step": step, "time_s": float(step), "values": {"reward": reward, "exact": reward / 2}}
        for step, reward in enumerate(rewards)
    ]
    records.append({"source": "eval", "step": len(rewards), "time_s": 9.0, "values": {"exact": 0.5, "rows": 4.0}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
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


def test_folders_of_runs_by_their_names(tmp_path: Path) -> None:
    folders = [put_run(tmp_path / name, rewards=[0.5]) for name in ("one", "two")]
    printed = table([run for folder in folders for run in read_runs(folder)])
    assert "one" in printed and "two" in printed
    assert main([*map(str, folders), "--picture", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").is_file()


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
    folder = tmp_path / "fresh"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: x\n")
    assert main([str(folder)]) == 0
    assert "no step to draw yet" in capsys.readouterr().out
