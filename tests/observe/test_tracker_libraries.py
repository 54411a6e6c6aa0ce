"""Tests W&B, MLflow and ClearML without a network: their files are read back and equal the recorded run.

The libraries are in a separate environment: `make test-trackers`. Tests of missing libraries are skipped.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.schema import TrackerConfig
from relax_core.contracts.sink import HistogramRecord, MetricRecord, Record, SinkConfig, TextRecord
from relax_core.observe.event_log import EventReader, EventWriter
from relax_core.observe.trackers.tracker_process import Trackers
from relax_core.registry import find_sink

HISTOGRAM = HistogramRecord(
    source="actor",
    step=1,
    time_s=2.0,
    name="response_tokens",
    limits=[2.0, 4.0],
    counts=[3, 4],
    least=1.0,
    largest=4.0,
    total=20.0,
    total_of_squares=60.0,
)
REWARDS = {0: 0.0, 1: 0.25, 2: 0.5}
BLOCK, HEAD = 32768, 7  # bytes in a block, and in a record's head, of the LevelDB log that W&B writes offline


def written(run_dir: Path, name: str, values: dict[str, Any]) -> None:
    """Writes three steps with a sink. A second process writes the last step, as in a resumed run."""
    (run_dir / "config.yaml").write_text("name: demo\nrun:\n  steps: 3\n")
    records: list[Record] = [
        MetricRecord(source="actor", step=step, time_s=100.0 + step, values={"reward": reward, "gap": float("nan")})
        for step, reward in REWARDS.items()
    ]
    texts = TextRecord(kind="eval", step=1, time_s=101.0, rows=[{"prompt": "p", "exact": True}])
    for batch in ([*records[:2], texts, HISTOGRAM], records[2:]):
        trackers = Trackers(TrackerConfig(tensorboard=False, sinks={name: values}), run_dir)
        writer = EventWriter(run_dir, "actor-0")
        writer.put(*batch)
        writer.close()
        assert trackers.close(records=len(list(EventReader(run_dir).each())), timeout_s=120.0) == ([], {})


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the import makes folders and does not remove them
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

    written(tmp_path, "wandb", {"offline": True})
    found: dict[int, float] = {}
    keys: set[str] = set()
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            record = WandbRecord()
            record.ParseFromString(data)
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            keys |= items.keys()
            if "actor/reward" in items:
                found[items["actor/step"]] = items["actor/reward"]
    assert found == REWARDS
    assert "actor/gap" not in keys
    for tag in ("eval/texts", "actor/response_tokens/distribution"):
        assert any(key.startswith(f"{tag}/") for key in keys), tag


def log_records(data: bytes) -> Iterator[bytes]:
    """Yields the records of a LevelDB log. Its first block begins with W&B's header of 7 bytes."""
    at, parts = HEAD, b""
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEAD:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in (1, 4):  # a complete record, or the last part of a record
            yield parts
            parts = b""


def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    written(tmp_path, "mlflow", {})
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("relax").experiment_id])
    assert run.info.run_name == tmp_path.name
    assert run.info.status == "FINISHED"
    assert run.data.params["run.steps"] == "3"
    assert run.data.metrics.keys() == {"actor/reward"}
    history = client.get_metric_history(run.info.run_id, "actor/reward")
    assert {metric.step: metric.value for metric in history} == REWARDS
    (texts,) = tmp_path.glob("mlflow_files/*/artifacts/texts/eval_1.json")
    assert json.loads(texts.read_text()) == [{"prompt": "p", "exact": True}]


def test_clearml(tmp_path: Path) -> None:
    pytest.importorskip("clearml")
    written(tmp_path, "clearml", {"offline": True})
    files = tmp_path.glob("clearml/offline/offline-*/metrics.jsonl")
    events = [event for file in files for line in file.read_text().splitlines() for event in json.loads(line)]
    assert {event["iter"]: event["value"] for event in events if event["variant"] == "reward"} == REWARDS
    assert {event["variant"] for event in events if event["metric"] == "actor"} == {"reward"}


@pytest.mark.parametrize("name", ["wandb", "mlflow", "clearml"])
def test_a_missing_library_or_key_is_refused_with_the_fix(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = find_sink(name)
    config: SinkConfig = spec.config(name=name)
    monkeypatch.setattr(f"relax_core.observe.trackers.{name}_sink.find_spec", lambda package: None)
    with pytest.raises(ValueError, match=rf"pip install 'relax-core\[{name}\]'"):
        spec.check(config)
    monkeypatch.setattr(f"relax_core.observe.trackers.{name}_sink.find_spec", lambda package: "there")
    monkeypatch.setenv("HOME", str(tmp_path))
    for key in ("WANDB_API_KEY", "CLEARML_API_ACCESS_KEY"):
        monkeypatch.delenv(key, raising=False)
    if name == "mlflow":
        spec.check(config)
        with pytest.raises(ValueError, match="uri=file:///x"):
            spec.check(spec.config(name=name, uri="file:///x"))  # type: ignore[call-arg]
        return
    with pytest.raises(ValueError, match="or offline: true"):
        spec.check(config)
    spec.check(spec.config(name=name, offline=True))  # type: ignore[call-arg]
