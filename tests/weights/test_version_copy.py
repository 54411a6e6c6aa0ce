"""Tests copies of published versions. Servers without access to the run's shared memory read these copies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from relax_core.contracts.private_folder import file_locked
from relax_core.weights.folder_stream import read_safetensors
from relax_core.weights.publisher import WeightPublisher
from relax_core.weights.transports import SharedMemoryTransport
from relax_core.weights.version_copy import LOCK, reading_copy
from relax_core.weights.version_file import read_weights
from relax_core.weights.version_folder import reading


def tensors(version: int) -> list[tuple[str, torch.Tensor]]:
    return [("still", torch.ones(5)), ("moves", torch.full((3,), float(version)))]


@pytest.mark.parametrize("frozen", [(), ("still",)])
def test_the_newest_version_is_copied_whole_and_old_copies_go(frozen: tuple[str, ...], tmp_path: Path) -> None:
    model, source, target = tmp_path / "model", tmp_path / "memory", tmp_path / "copies" / "0"
    model.mkdir()
    (model / "config.json").write_text("{}")
    publisher = WeightPublisher(source, list, transport=SharedMemoryTransport(), model_folder=model, frozen=frozen)
    for version in range(4):
        published = publisher.publish(version, tensors(version)).manifest
        with reading_copy(source, target, reader="engine-1", deadline_s=5.0) as copied:
            assert copied.version == version and copied.digest == published.digest
            folder = Path(copied.path).parent
            assert folder.is_relative_to(target) and (folder / "config.json").read_text() == "{}"
            for found in (dict(read_weights(copied)), dict(read_safetensors(folder))):
                assert found.keys() == {"still", "moves"} and found["moves"].tolist() == [version] * 3
            with reading_copy(source, target, reader="engine-2", deadline_s=5.0) as again:
                assert again == copied
    assert sorted(path.name for path in target.iterdir() if path.name.isdecimal()) == ["00000002", "00000003"]
    assert target.parent.stat().st_mode & 0o777 == 0o700
    assert not any(path.is_symlink() and source in path.readlink().parents for path in target.rglob("*"))
    publisher.close()


def test_one_copies_while_others_wait_and_what_is_read_stays(tmp_path: Path) -> None:
    source, target = tmp_path / "memory", tmp_path / "copy"
    publisher = WeightPublisher(source, list, transport=SharedMemoryTransport())
    publisher.publish(0, tensors(0))
    with reading_copy(source, target, reader="slow", deadline_s=5.0) as slow:
        for version in range(1, 6):
            publisher.publish(version, tensors(version))

            def read(reader: int) -> int:
                with reading_copy(source, target, reader=f"engine-{reader}", deadline_s=30.0) as copied:
                    return int(dict(read_weights(copied))["moves"][0])

            with ThreadPoolExecutor(4) as pool:
                assert list(pool.map(read, range(4))) == [version] * 4
        assert dict(read_weights(slow))["moves"].tolist() == [0.0] * 3
    with (
        file_locked(source / LOCK, deadline_s=1.0, makes="a copy"),
        pytest.raises(TimeoutError, match="a copy of the weights"),
        reading_copy(source, target, reader="late", deadline_s=0.1),
    ):
        pass
    with reading(target, reader="late") as newest:
        assert newest.version == 5
    publisher.close()
