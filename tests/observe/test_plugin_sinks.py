"""Metrics sinks that are plug-ins: what they write, and that a broken one concerns nobody else."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.config.sections.tracker_schema import TrackerConfig
from relax_core.observe.service.metrics_service import MetricsService
from relax_core.observe.service.sinks import make_sinks, read_metrics

CSV_SINK = str(Path(__file__).resolve().parents[2] / "examples" / "plugins" / "csv_sink.py")
T = 120.0
BROKEN = """
from relax_core.contracts.sink import BaseSink, SinkConfig, SinkSpec

class Log(BaseSink):
    def __init__(self, start):
        self.path = start.run_dir / "calls"

    def write(self, batch):
        with self.path.open("a") as file:
            file.write(f"write {len(batch)}\\n")

    def flush(self):
        with self.path.open("a") as file:
            file.write("flush\\n")

def open_it(start, config):
    return HERE

SPEC = SinkSpec(name="broken", summary="s", config=SinkConfig, open=open_it)
"""


def tracker(sinks: Any) -> TrackerConfig:
    return TrackerConfig(name="local", tensorboard=False, jsonl=True, sinks=sinks)


def service_of(sinks: Any, run_dir: Path) -> MetricsService:
    return MetricsService(make_sinks(tracker(sinks), run_dir), history=read_metrics(run_dir), batch_s=0.0)


def lines_of(file: Path) -> list[list[str]]:
    with file.open(newline="", encoding="utf-8") as opened:
        return [line[1:] for line in csv.reader(opened)]  # without the time


def test_the_example_keeps_every_number_and_a_restarted_service_adds_to_it(tmp_path: Path) -> None:
    sinks = {CSV_SINK: {"file": "numbers.csv", "sources": ["actor"]}}
    first = service_of(sinks, tmp_path)
    first.record("actor", 0, {"reward": 0.5, "loss": 2.0})
    first.record("rollout", 0, {"samples": 8})
    first.record_texts("eval", 0, [{"prompt": "a"}])
    assert first.close(timeout_s=T).problems == []
    second = service_of(sinks, tmp_path)
    second.record("actor", 1, {"reward": 0.75})
    assert second.close(timeout_s=T).problems == []
    assert lines_of(tmp_path / "numbers.csv") == [
        ["source", "step", "name", "value"],
        ["actor", "0", "reward", "0.5"],
        ["actor", "0", "loss", "2.0"],
        ["actor", "1", "reward", "0.75"],
    ]


@pytest.mark.parametrize(
    ("opened", "told"),
    [
        ("None", "open_it returned None of type NoneType. Wanted: an object of a class under BaseSink"),
        ("[][0]", "IndexError"),
    ],
)
def test_a_sink_that_does_not_open_is_told_and_counted_and_the_files_go_on(
    tmp_path: Path, opened: str, told: str
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN.replace("HERE", opened))
    service = service_of([str(file)], tmp_path)
    for step in range(3):
        service.record("actor", step, {"reward": 0.5})
        service.flush(timeout_s=T)
    end = service.close(timeout_s=T)
    assert any("metrics: broken cannot be written" in problem and told in problem for problem in end.problems)
    assert end.dropped == {"broken": 3}
    assert [record.step for record in read_metrics(tmp_path)] == [0, 1, 2]


def test_a_file_that_is_gone_when_the_service_starts_again_costs_its_own_sink_alone(tmp_path: Path) -> None:
    service = service_of([str(tmp_path / "gone.py")], tmp_path)
    service.record("actor", 0, {"reward": 0.5})
    end = service.close(timeout_s=T)
    assert any("gone.py: no such file" in problem for problem in end.problems)
    assert len(read_metrics(tmp_path)) == 1


def test_a_sink_is_flushed_when_no_record_waits(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN.replace("HERE", "Log(start)"))
    service = service_of([str(file)], tmp_path)
    service.record("actor", 0, {"reward": 0.5})
    assert service.close(timeout_s=T).problems == []
    assert (tmp_path / "calls").read_text().splitlines() == ["write 1", "flush"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            f"tracker.sinks={{{CSV_SINK}: {{fil: x}}}}",
            "tracker.sinks.csv_sink.fil is not a setting of .*csv_sink.py. Nearest",
        ),
        (f"tracker.sinks={{{CSV_SINK}: {{file: /x.csv}}}}", "tracker.sinks.csv_sink.file=/x.csv: give a path below"),
        (f"tracker.sinks={{{CSV_SINK}: {{sources: 3}}}}", "tracker.sinks.csv_sink.sources"),
        (f"tracker.sinks=[{CSV_SINK},{CSV_SINK}]", "csv_sink.py is named twice"),
        ("tracker.sinks=[tensorboard]", "tensorboard has a key of its own. Use tracker.tensorboard=true."),
        ("tracker.sinks=[nobody]", "tracker.sinks=nobody is not known. What exists: clearml, jsonl, mlflow"),
        ("tracker.sinks=csv", "tracker.sinks=csv: Give a list"),
    ],
    ids=["unknown key", "refused value", "wrong type", "twice", "own key", "unknown sink", "no list"],
)
def test_a_mistake_is_told_before_the_start(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([override])


def test_a_path_is_absolute_whatever_folder_the_service_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(CSV_SINK).parent)
    assert load_config(["tracker.sinks=[csv_sink.py]"]).tracker.sinks == [CSV_SINK]
    assert load_config(["tracker.sinks={csv_sink.py: {file: a.csv}}"]).tracker.sinks == {CSV_SINK: {"file": "a.csv"}}
