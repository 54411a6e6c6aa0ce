"""Tests the weight publisher with real engine processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from relax_core.contracts.engine import EngineError, WeightManifest
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.protocol.engine_client import EngineClient, TokensToScore
from relax_core.weights.folder_stream import read_safetensors
from relax_core.weights.publisher import WeightPublisher
from relax_core.weights.transports import SharedMemoryTransport
from relax_core.weights.version_file import read_weights
from relax_core.weights.version_folder import (
    KEPT_VERSIONS,
    LATEST,
    PUSHED,
    PublishedUnreadable,
    VersionFolder,
    read_latest,
    read_pushed,
    reading,
)
from relax_core.weights.version_writer import FROZEN, FROZEN_FOLDER
from tests.contracts.engine.harness import TOKEN, Engine, hf_weights, make_model
from tests.outages import filled
from tests.vision_models import Seen, make_tiny_vision_model, text


def version_of(engine: Engine) -> str:
    return str(engine.client.model_info()["weight_version"])


def test_a_new_engine_gets_the_frozen_tower_before_it_serves(
    start_engine: Callable[..., Engine], launch: EngineLaunch, tmp_path: Path
) -> None:
    """The engine is killed after versions that contained no tensor of the tower."""
    changes: dict[str, object] = {
        "model_folder": tmp_path / "model",
        "media_folder": tmp_path / "media",
        "load_weights": False,
        "engine": replace(launch.engine, context_length=512),
    }
    model = make_tiny_vision_model(tmp_path / "model")
    seen = Seen(tmp_path / "model", tmp_path / "media")
    ids, media = seen.prompt(text(3), seen.image(2, 3), text(4))
    weights = list(read_safetensors(tmp_path / "model"))
    engines = [start_engine(**changes)]
    publisher = WeightPublisher(
        tmp_path / "weights",
        lambda: [engines[-1].client],
        transport=SharedMemoryTransport(),
        frozen=[name for name, _ in weights if ".visual." in name],
    )

    def scores() -> torch.Tensor:
        given = TokensToScore(input_ids=ids, first=1, media=media)
        return torch.tensor(engines[-1].client.score([given], top_k=0, temperature=1.0)[0].logprobs)

    assert publisher.publish(1, weights).result(timeout=120.0).refused == {}
    before = scores()
    torch.testing.assert_close(before, seen.logprobs(model, ids, media), atol=2e-5, rtol=0)
    file = tmp_path / "weights" / FROZEN_FOLDER / FROZEN
    away = file.rename(tmp_path / "away")
    assert publisher.publish(2, weights).result(timeout=120.0).refused == {}
    assert torch.equal(scores(), before)

    os.kill(engines[0].process.pid, signal.SIGKILL)
    engines.append(start_engine(**changes))
    (why,) = publisher.publish(3, weights).result(timeout=120.0).refused.values()
    assert FROZEN in why and version_of(engines[1]) == "-1", "it never serves without them"
    away.rename(file)
    latest = read_latest(tmp_path / "weights")
    assert latest is not None
    engines[1].client.update_weights(latest)
    assert version_of(engines[1]) == "3" and torch.equal(scores(), before)
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


class Slow:
    """A receiver that responds when the test allows it."""

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


def test_the_record_of_a_push_waits_while_the_disk_is_full(
    small_disk: Callable[[str], Path], wait_until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    disk, full = small_disk("1m"), ExitStack()

    class FillsTheDisk(Slow):
        def update_weights(self, manifest: WeightManifest) -> dict:
            full.enter_context(filled(disk))
            return super().update_weights(manifest)

    publisher = WeightPublisher(disk, lambda: [FillsTheDisk("a")], transport=SharedMemoryTransport(), outage_s=60.0)
    push = publisher.publish(3, [("a", torch.ones(2))])
    wait_until(lambda: "waits for the disk" in caplog.text, what="an outage")
    full.close()
    assert push.result(timeout=120.0).refused == {} and read_pushed(disk) == 3
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
        with monkeypatch.context() as patch:  # The change happens between two reads.
            patch.setattr("relax_core.weights.version_folder.time.sleep", goes_on_being_written)
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
        for manifest in manifests[-2:]:  # A reader of the previous manifest must still find the manifest's file.
            ((_, value),) = read_weights(manifest)
            assert value.tolist() == [float(manifest.version)] * 5
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["00000002", "00000003", "latest.json", "pushed.json"]
    publisher.close()


def test_a_stopped_engine_holds_up_no_other_and_no_later_version(
    start_engine: Callable[..., Engine], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """The file of a pending push stays until the engine responds, even if many versions are published meanwhile."""
    lives, stopped = start_engine(), start_engine()
    publisher = WeightPublisher(tmp_path, lambda: [lives.client, stopped.client], transport=SharedMemoryTransport())
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        reports = [publisher.publish(1, hf_weights(make_model(None, seed=1))).result(timeout=1.0)]
        # The publisher knows that the engine is late. Waiting for it would last until the client's timeout.
        for version in range(2, 6):
            weights = hf_weights(make_model(None, seed=version))
            reports.append(publisher.publish(version, weights).result(timeout=120.0))
    finally:
        os.kill(stopped.process.pid, signal.SIGCONT)
    assert [report.behind for report in reports] == 5 * [{stopped.process.url}]
    assert all(not report.refused for report in reports)
    assert version_of(lives) == "5"
    wait_until(lambda: version_of(stopped) == "1", what="the push of the version that it was sent")
    wait_until(lambda: not publisher._in_flight, what="its answer")
    publisher.publish(6, hf_weights(make_model(None, seed=6))).result(timeout=120.0)
    wait_until(lambda: version_of(stopped) == "6", what="the next push")
    report = publisher.publish(7, hf_weights(make_model(None, seed=7))).result(timeout=120.0)
    assert not report.behind and not report.refused, "it is waited for again"
    assert version_of(lives) == version_of(stopped) == "7"
    assert sorted(path.name for path in tmp_path.glob("0*")) == ["00000006", "00000007"]
    publisher.close()


def test_an_engine_that_was_given_up_is_pushed_to_and_not_waited_for(
    start_engine: Callable[..., Engine], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """The client's wait has ended, too. Whether the engine still runs is unknown."""
    engine = start_engine()
    client = EngineClient(engine.process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=5.0)
    publisher = WeightPublisher(tmp_path, lambda: [client], transport=SharedMemoryTransport())
    os.kill(engine.process.pid, signal.SIGSTOP)
    try:
        assert publisher.publish(1, hf_weights(make_model(None, seed=1))).result(timeout=0.1).behind
        wait_until(lambda: not publisher._in_flight, what="the end of the client's patience")
        report = publisher.publish(2, hf_weights(make_model(None, seed=2))).result(timeout=120.0)
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)
    assert list(report.refused) == [client.url], "the push of version 1 has ended"
    assert report.behind == {client.url}, "that of version 2 was waited for"
    wait_until(lambda: version_of(engine) == "2", what="the push that nobody waited for")
    publisher.close()


def test_a_push_that_ends_late_takes_nothing_back(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    gate = threading.Event()
    late, quick = Slow("late", gate, error="no"), Slow("quick")
    publisher = WeightPublisher(tmp_path, lambda: [late, quick], transport=SharedMemoryTransport())
    assert publisher.publish(1, [("a", torch.ones(2))]).result(timeout=0.2).behind == {"late"}
    assert read_pushed(tmp_path) == -1, "its push goes on"
    assert publisher.publish(2, [("a", torch.ones(2))]).result(timeout=120.0).behind == {"late"}
    assert read_pushed(tmp_path) == 2 and quick.versions == [1, 2]
    gate.set()
    wait_until(lambda: not publisher._in_flight, what="the late end")
    assert read_pushed(tmp_path) == 2
    assert publisher.publish(3, [("a", torch.ones(2))]).result(timeout=120.0).refused == {"late": "no"}
    publisher.close()


def test_an_engine_that_has_left_is_forgotten_once_its_push_has_ended(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """The publisher then waits for another engine with the same address."""
    forgotten: list[str] = []

    class Transport(SharedMemoryTransport):
        def forget(self, url: str) -> None:
            forgotten.append(url)

    gate = threading.Event()
    receivers = [Slow("leaves", gate), Slow("stays")]
    publisher = WeightPublisher(tmp_path, lambda: receivers, transport=Transport())
    assert publisher.publish(1, [("a", torch.ones(2))]).result(timeout=0.2).behind == {"leaves"}
    publisher.forget("leaves")
    publisher.forget("unknown")
    wait_until(lambda: forgotten == ["unknown"], what="a queue of its own")
    gate.set()
    wait_until(lambda: forgotten == ["unknown", "leaves"] and not publisher._silent, what="the end of its push")
    publisher.close()


def test_a_fault_of_our_own_is_raised(tmp_path: Path) -> None:
    broken = Slow("broken")
    broken.update_weights = lambda manifest: {}  # type: ignore[method-assign]
    publisher = WeightPublisher(tmp_path, lambda: [broken], transport=SharedMemoryTransport())
    with pytest.raises(KeyError, match="stall_ms"):
        publisher.publish(1, [("a", torch.ones(2))]).result(timeout=120.0)

    def nobody() -> list[Slow]:
        raise LookupError("no directory")

    publisher = WeightPublisher(tmp_path / "second", nobody, transport=SharedMemoryTransport())
    with pytest.raises(LookupError, match="no directory"):
        publisher.publish(1, [("a", torch.ones(2))]).result(timeout=120.0)


def test_the_file_that_is_read_is_there_while_a_removal_looks_for_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = WeightPublisher(tmp_path, list, transport=SharedMemoryTransport())
    publisher.publish(0, [("a", torch.zeros(5))]).result(timeout=120.0)
    seen = []
    marked = VersionFolder._marked

    def look(folder: VersionFolder) -> set[int]:
        seen.append(Path(manifest.path).exists())
        return marked(folder)

    monkeypatch.setattr(VersionFolder, "_marked", look)
    with reading(tmp_path, reader="engine-0") as manifest:
        for version in range(1, 4):
            publisher.publish(version, [("a", torch.zeros(5))]).result(timeout=120.0)
    publisher.close()
    assert seen and all(seen)
    assert not list(tmp_path.glob("*.removal"))


def test_a_version_stays_while_somebody_reads_it(tmp_path: Path) -> None:
    """Readers start at any moment of publishing and removal. Each finds its complete file until it ends."""
    publisher = WeightPublisher(tmp_path, list, transport=SharedMemoryTransport())
    publisher.publish(0, [("a", torch.zeros(5))]).result(timeout=120.0)
    ended, read, failures = threading.Event(), [0, 0], []

    def read_on(reader: int) -> None:
        try:
            while not ended.is_set():
                with reading(tmp_path, reader=f"engine-{reader}") as manifest:
                    for _ in range(3):
                        ((_, value),) = read_weights(manifest)
                        assert value.tolist() == [float(manifest.version)] * 5
                read[reader] += 1
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read_on, args=(reader,)) for reader in range(2)]
    for thread in readers:
        thread.start()
    version = 0
    while not failures and (version < 300 or min(read) < 50):
        version += 1
        publisher.publish(version, [("a", torch.full((5,), float(version)))]).result(timeout=120.0)
    ended.set()
    for thread in readers:
        thread.join()
    assert not failures
    for last in range(version + 1, version + 1 + KEPT_VERSIONS):
        publisher.publish(last, [("a", torch.zeros(5))]).result(timeout=120.0)
    assert len(list(tmp_path.glob("0*"))) == KEPT_VERSIONS, "nobody reads, and old versions are there"
    with reading(tmp_path, reader="engine-0") as manifest:
        for last in range(version + 10, version + 15):
            publisher.publish(last, [("a", torch.zeros(5))]).result(timeout=120.0)
        assert Path(manifest.path).exists()
    publisher.close()
