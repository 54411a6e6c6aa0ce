"""Tests that bytes reach the disk while a file is written and not all at its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_models import make_model
from tiny_trainer import dp_groups, make_backend, train_step

from relax_core.train.checkpoints import checkpoint_shards
from relax_core.train.checkpoints.checkpoint_shards import SyncedFiles


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records a file's size at each sync, which happens after 1000 bytes in this test."""
    sizes: list[int] = []
    sync = os.fdatasync

    def traced(file: int) -> None:
        sync(file)
        sizes.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fdatasync", traced)
    monkeypatch.setattr(checkpoint_shards, "SYNC_BYTES", 1000)
    return sizes


def test_of_a_file(tmp_path: Path, synced: list[int]) -> None:
    with SyncedFiles().create_stream(tmp_path / "file", "wb") as stream:
        for number in range(10):
            stream.write(bytes([number]) * 300)
    assert synced == [1200, 2400]
    assert (tmp_path / "file").read_bytes() == b"".join(bytes([number]) * 300 for number in range(10))


def test_of_a_checkpoint(tmp_path: Path, synced: list[int]) -> None:
    make_model(tmp_path / "model")
    backend = make_backend(tmp_path / "model")
    train_step(backend, dp_groups())
    backend.save(tmp_path / "checkpoint")
    assert len(synced) > 3
    backend.load(tmp_path / "checkpoint")
