"""Tests plug-ins of five kinds in one run: the files of docs/plugins/, each with a non-default setting. The user's
project also has packages `algorithms` and `rewards`.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from relax_core.observe.event_log import read_metrics
from tests.data.test_plugin_source import ROWS, write_database
from tests.integration.live_run import ROOT, run_to_end

pytestmark = pytest.mark.integration

EXAMPLES = ROOT / "examples" / "plugins"


def make_project(folder: Path) -> None:
    """Makes packages with the names of Relax's packages. A wrong import of these packages ends the process. One package
    contains the reward's file, which imports a neighbouring module.
    """
    for package in ("algorithms", "rewards", "envs", "launchers"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("raise SystemExit('of the project')\n")
    (folder / "algorithms" / "functional.py").write_text("raise SystemExit('of the project')\n")
    (folder / "rewards" / "project_targets.py").write_text("TARGET = 4\n")
    text = (EXAMPLES / "length.py").read_text().replace("target: int = 5", "target: int = TARGET")
    assert "TARGET" in text
    imported = "from rewards.project_targets import TARGET\n\n\n@dataclass"
    (folder / "rewards" / "mine.py").write_text(text.replace("\n\n@dataclass", f"\n{imported}", 1))


def test_a_file_on_the_command_line_trains(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    make_project(project)
    file = EXAMPLES / "quantile_baseline.py"
    keys = (
        *(f"algo.name={file}", "algo.quantile=0", "algo.group_size=8", "mode=colocate"),
        *("reward.name=rewards/mine.py", f"env.name={EXAMPLES}/polite.py", "env.system=Go"),
        *(f"data.name={EXAMPLES}/sqlite_source.py", "model.task=reverse_digits", "data.eval_size=8"),
        f"data.config.database={write_database(tmp_path / 'rows.db', ROWS)}",
        f"tracker.sinks={{{EXAMPLES}/csv_sink.py: {{file: numbers.csv}}}}",
    )
    short = ("run.steps=8", "eval.every=0", "run.save_every=0", "run.export_hf=false")
    run = run_to_end(tmp_path / "run", *keys, *short, cwd=project)
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    assert run.summary["ledger"]["trained"] == 8 * 8 * 8
    steps = run.steps()
    for values in steps:
        # The baseline is the group's lowest reward: no advantage is negative. The ratio is 1, so no loss is above 0.
        assert values["loss"] <= 0.0 and values["algorithm/advantage"] >= 0.0
    assert any(values["loss"] < 0.0 and values["grad_norm"] > 0.0 for values in steps)
    # The saved configuration has the plug-in files and their settings, so the run can be resumed.
    saved = (run.folder / "config.yaml").read_text()
    assert f"name: {file}" in saved and "quantile: 0.0" in saved
    assert f"name: {project}/rewards/mine.py" in saved and "target: 4" in saved
    with (run.folder / "numbers.csv").open(newline="") as lines:
        rewards = {int(row["step"]): float(row["value"]) for row in csv.DictReader(lines) if row["name"] == "reward"}
    of_files = {metric.step: metric.values["reward"] for metric in read_metrics(run.folder) if metric.source == "actor"}
    assert rewards == of_files and sorted(rewards) == list(range(8))
