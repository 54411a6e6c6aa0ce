"""The trainer's end of weight sync, against real engine processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from relax_core.contracts.engine import EngineError, WeightManifest
from relax_core.weights.files import read_weights
from relax_core.weights.publisher import (
    LATEST,
    PUSHED,
    PublishedUnreadable,
    WeightPublisher,
    read_latest,
    read_pushed,
)
from relax_core.weights.transports.files import SharedMemoryTransport
from tests.contracts.engine.harness import Engine, hf_weights, make_model


def version_of(engine: Engine) -> str:
    return str(engine.client.model_info()["weight_version"])


def test_versions_reach_every_engine_and_a_dead_one_is_named(
    start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    first, second = start_engine(), start_engine()
    publisher = WeightPublisher(
        tmp_path / "weights", lambda: [first.client, second.client], transport=SharedMemoryTransport()
    )
    weights = hf_weights(make_model(None, seed=1))
    report = publisher.publish(1, weights).result(timeout=120.0)
    assert (report.version, report.refused) == (1, {})
    assert report.bytes == sum(value.numel() * value.element_size() for _, value in weights)
    assert version_of(first) == version_of(second) == "1"

    os.kill(second.process.pid, signal.SIGKILL)
    report = publisher.publish(2, hf_weights(make_model(None, seed=2))).result(timeout=120.0)
    assert list(report.refused) == [second.process.url]
    assert second.process.url in report.refused[second.process.url]
    assert version_of(first) == "2"
    publisher.close()


def test_weights_of_another_model_are_refused_and_not_served(
    start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = start_engine()
    publisher = WeightPublisher(tmp_path, lambda: [engine.client], transport=SharedMemoryTransport())
    report = publisher.publish(1, [("a", torch.zeros(3))]).result(timeout=120.0)
    assert list(report.refused) == [engine.process.url]
    assert version_of(engine) == "0"
    assert publisher.publish(2, hf_weights(make_model(None, seed=2))).result(timeout=120.0).refused == {}
    assert version_of(engine) == "2"
    publisher.close()


def test_bytes_that_are_not_those_published_are_refused(start_engine: Callable[..., Engine], tmp_path: Path) -> None:
    """A receiver between publisher and engine changes one byte of the file, as a bad memory would."""
    engine = start_engine()

    class Damaged:
        url = engine.process.url
        group_ranks = 1

        def update_weights(self, manifest: WeightManifest) -> dict:
            data = bytearray(Path(manifest.path).read_bytes())
            data[-1000] ^= 1
            Path(manifest.path).write_bytes(data)
            return engine.client.update_weights(manifest)

    publisher = WeightPublisher(tmp_path, lambda: [Damaged()], transport=SharedMemoryTransport())
    why = publisher.publish(1, hf_weights(make_model(None, seed=1))).result(timeout=120.0).refused[engine.process.url]
    assert "bucket 0: digest" in why
    assert version_of(engine) == "0"
    publisher.close()


class Slow:
    """A receiver that answers when it is told to."""

    group_ranks = 1

    def __init__(self, url: str, gate: threading.Event | None = None, error: str = "") -> None:
        self.url, self._gate, self._error = url, gate, error
        self.versions: list[int] = []

    def update_weights(self, manifest: WeightManifest) -> dict:
        if self._gate is not None:
            assert self._gate.wait(120.0)
        if self._error:
            raise EngineError(self._error)
        self.versions.append(manifest.version)
        return {"stall_ms": 0.0}


def test_one_refusal_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    gate = threading.Event()
    waits, refuses = Slow("waits", gate), Slow("refuses", error="no")
    opens = Slow("opens")
    opens.update_weights = lambda manifest: (gate.set(), {"stall_ms": 0.0})[1]  # type: ignore[method-assign]
    publisher = WeightPublisher(tmp_path, lambda: [waits, refuses, opens], transport=SharedMemoryTransport())
    assert publisher.publish(3, [("a", torch.ones(2))]).result(timeout=120.0).refused == {"refuses": "no"}
    assert waits.versions == [3]
    publisher.close()


@pytest.mark.parametrize("name", [LATEST, PUSHED])
def test_a_damaged_file_is_read_again_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    publisher = WeightPublisher(tmp_path, list, transport=SharedMemoryTransport())
    publisher.publish(7, [("a", torch.ones(2))]).result(timeout=120.0)
    publisher.close()
    file = tmp_path / name
    whole = file.read_bytes()
    read = read_latest if name == LATEST else read_pushed
    before = read(tmp_path)

    def goes_on_being_written(seconds: float) -> None:
        file.write_bytes(whole)

    for damaged in (whole[: len(whole) // 2], b"", whole.replace(b"7", b"9"), b"[]", b"\xff" * 40):
        file.write_bytes(damaged)
        with pytest.raises(PublishedUnreadable, match=rf"{file} is damaged: .*The next version"):
            read(tmp_path)
        with monkeypatch.context() as patch:  # what happens between two reads
            patch.setattr("relax_core.weights.publisher.time.sleep", goes_on_being_written)
            assert read(tmp_path) == before


def test_the_newest_is_left_for_whoever_comes_later(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "weights"
    publisher = WeightPublisher(folder, list, transport=SharedMemoryTransport())
    assert read_latest(folder) is None
    manifests = []
    for version in range(4):
        publisher.publish(version, [("a", torch.full((5,), float(version)))]).result(timeout=120.0)
        latest = read_latest(folder)
        assert latest is not None and latest.version == version
        manifests.append(latest)
        for manifest in manifests[-2:]:  # who has just read the one before must still find its file
            ((_, value),) = read_weights(manifest)
            assert value.tolist() == [float(manifest.version)] * 5
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["00000002", "00000003", "latest.json", "pushed.json"]
    publisher.close()
