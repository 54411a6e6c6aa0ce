"""Tests that frozen weights are written once, and that the digest of each version covers frozen weights."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from relax_core.weights.folder_stream import read_safetensors
from relax_core.weights.publisher import WeightPublisher
from relax_core.weights.transports import CollectiveTransport, SharedMemoryTransport
from relax_core.weights.version_file import DigestMismatch, WeightFile, read_weights
from relax_core.weights.version_folder import read_latest
from relax_core.weights.version_writer import FROZEN, FROZEN_FOLDER, VersionWriter
from tests.contracts.engine.harness import hf_weights, make_model


def tensors(seed: float) -> list[tuple[str, torch.Tensor]]:
    return [("still", torch.ones(5)), ("moves", torch.full((3,), seed)), ("also still", torch.arange(4.0))]


def write(folder: Path, writer: VersionWriter, version: int) -> Any:
    (folder / str(version)).mkdir()
    return writer.write(folder / str(version), version, tensors(float(version)))


def test_a_version_has_all_tensors_and_its_own_file_has_those_that_train(tmp_path: Path) -> None:
    writer = VersionWriter(tmp_path, frozen=["still", "also still"], model_folder=None)
    first, second = write(tmp_path, writer, 1), write(tmp_path, writer, 2)
    assert first.frozen == second.frozen and first.digest != second.digest
    for version, manifest in ((1, first), (2, second)):
        assert [name for name, _ in read_weights(manifest, with_frozen=False)] == ["moves"]
        assert manifest.total_bytes == 12
        expected = dict(tensors(float(version)))
        for found in (dict(read_weights(manifest)), dict(read_safetensors(tmp_path / str(version)))):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_digest_covers_the_frozen_tensors(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    manifest = write(tmp_path, VersionWriter(tmp_path, frozen=["still"], model_folder=None), 1)
    other_version = write(tmp_path, VersionWriter(tmp_path / "two", frozen=["also still"], model_folder=None), 2)
    for wrong in (
        msgspec.structs.replace(manifest, frozen=None),
        msgspec.structs.replace(manifest, frozen=other_version.frozen),
    ):
        for with_frozen in (False, True):
            with pytest.raises(DigestMismatch, match="manifest's own digest"):
                next(read_weights(wrong, with_frozen=with_frozen))
    with pytest.raises(ValueError, match="in more than one file"):
        next(read_weights(msgspec.structs.replace(manifest, frozen=manifest)))
    file = tmp_path / FROZEN_FOLDER / FROZEN
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DigestMismatch, match="bucket 0"):
        next(read_weights(manifest))
    assert len(dict(read_weights(manifest, with_frozen=False))) == 2


def test_a_transport_that_sends_tensors_sends_all(tmp_path: Path) -> None:
    for name, transport in (
        ("one", SharedMemoryTransport()),
        ("two", CollectiveTransport("gloo", host="", timeout_s=1)),
    ):
        publisher = WeightPublisher(tmp_path / name, list, transport=transport, frozen=["still"])
        publisher.publish(1, tensors(1.0)).result(timeout=60.0)
        publisher.close()
    first, second = read_latest(tmp_path / "one"), read_latest(tmp_path / "two")
    assert first is not None and second is not None and first.frozen is not None and second.frozen is None
    assert (first.total_bytes, second.total_bytes) == (28, 48)


def test_a_version_loads_as_a_model_of_transformers(tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    model = make_model(tmp_path / "model", seed=0)
    weights = hf_weights(model)
    frozen = [name for name, _ in weights if "layers.0." in name]
    writer = VersionWriter(tmp_path, frozen=frozen, model_folder=tmp_path / "model")
    (tmp_path / "1").mkdir()
    writer.write(tmp_path / "1", 1, weights)
    found = Qwen3ForCausalLM.from_pretrained(tmp_path / "1").state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: WeightFile, name: str, tensor: torch.Tensor) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(WeightFile, "add", full)
    with pytest.raises(OSError, match=rf"weight version 1 .*{tmp_path}.*No space left.*bytes are free"):
        write(tmp_path, VersionWriter(tmp_path, frozen=[], model_folder=None), 1)
