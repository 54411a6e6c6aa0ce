"""Tests that a saved, stopped and loaded run continues exactly like an uninterrupted run, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_model
from tiny_trainer import dp_groups, make_backend, make_critic, train_step

from benchmarks.parity_media import HYBRID_EXPERTS, Items, make_case
from benchmarks.parity_media import make_model as make_parity_model
from benchmarks.parity_omni import OMNI, OmniItems, make_omni_case, make_omni_model
from relax_core.contracts.media_file import FolderReader
from relax_core.train.checkpoints import checkpoint_shards
from relax_core.train.checkpoints.checkpoint_shards import StoredFolder, SyncedFiles
from relax_core.train.checkpoints.checkpoint_store import CheckpointStore
from relax_core.train.checkpoints.provenance import read_provenance
from tests.train.rank_server import run_ranks


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records a file's size at each sync. In this test a sync happens every 1000 bytes."""
    sizes: list[int] = []
    sync = os.fdatasync

    def traced(file: int) -> None:
        sync(file)
        sizes.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fdatasync", traced)
    monkeypatch.setattr(checkpoint_shards, "SYNC_BYTES", 1000)
    return sizes


def test_files_come_to_the_disk_while_they_are_written(tmp_path: Path, synced: list[int]) -> None:
    with SyncedFiles().create_stream(tmp_path / "file", "wb") as stream:
        for number in range(10):
            stream.write(bytes([number]) * 300)
    assert synced == [1200, 2400]
    assert (tmp_path / "file").read_bytes() == b"".join(bytes([number]) * 300 for number in range(10))
    make_model(tmp_path / "model")
    backend = make_backend(tmp_path / "model")
    train_step(backend, dp_groups())
    backend.save(tmp_path / "checkpoint")
    assert len(synced) > 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


def train(backend: Any, steps: range) -> Any:
    for step in steps:
        metrics = train_step(backend, dp_groups(), step=step)
    return metrics


def stored(folder: StoredFolder) -> list[tuple[str, torch.Tensor]]:
    return list(folder.read(sorted(folder.tensors()), bucket_bytes=1 << 20))


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(("sharded", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_goes_on_to_the_bit(folder: Path, tmp_path: Path, sharded: bool, dtype: str) -> None:
    settings: dict[str, Any] = {
        "distributed_optimizer": sharded,
        "dtype": dtype,
        "optimizer": {"weight_decay": 0.1, "warmup_steps": 4},
    }
    straight = make_backend(folder, **settings)
    train(straight, range(3))
    straight.save(tmp_path / "checkpoint")
    expected = train(straight, range(3, 6))

    resumed = make_backend(folder, **settings)
    train(resumed, range(1))  # the checkpoint must replace the state of this training
    resumed.load(tmp_path / "checkpoint")
    metrics = train(resumed, range(3, 6))
    assert (metrics.loss, metrics.grad_norm, metrics.learning_rate) == (
        expected.loss,
        expected.grad_norm,
        expected.learning_rate,
    )
    assert_same_bits(dict(resumed.export()), dict(straight.export()))


@pytest.mark.parametrize("family", [OMNI, HYBRID_EXPERTS])
def test_a_run_with_items_goes_on_to_the_bit(tmp_path: Path, family: str) -> None:
    """Three steps equal one step, a stop and two more steps. Groups have all media kinds of the family."""
    model, media = tmp_path / "model", tmp_path / "media"
    if family == OMNI:
        make_omni_model(model)
        groups = make_omni_case("mixed", OmniItems(model, media))
    else:
        make_parity_model(model, family)
        groups = make_case("mixed", Items(model, media))
    settings: dict[str, Any] = {"family": family, "media": FolderReader(media), "optimizer": {"weight_decay": 0.1}}

    def steps(backend: Any, numbers: range) -> Any:
        for step in numbers:
            metrics = train_step(backend, [groups[step:], groups[:step]] if step else [groups], step=step)
        return metrics

    straight = make_backend(model, **settings)
    steps(straight, range(1))
    straight.save(tmp_path / "checkpoint")
    expected = steps(straight, range(1, 3))
    resumed = make_backend(model, **settings)
    resumed.load(tmp_path / "checkpoint")
    metrics = steps(resumed, range(1, 3))
    assert (metrics.loss, metrics.grad_norm) == (expected.loss, expected.grad_norm)
    assert_same_bits(dict(resumed.export()), dict(straight.export()))


def test_every_random_stream_goes_on(folder: Path, tmp_path: Path) -> None:
    # This import must come after the backend's import, because the backend installs the device loader.
    from megatron.core import tensor_parallel

    def draw() -> list[float]:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            tracked = torch.rand(1).item()
        return [
            torch.rand(1).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), tracked
        ]  # fmt: skip

    backend = make_backend(folder)
    train(backend, range(1))
    random.gauss(0, 1)  # numpy and Python draw normal numbers in pairs and store the second number
    np.random.randn()
    backend.save(tmp_path / "checkpoint")
    expected = draw()
    assert draw() != expected
    backend.load(tmp_path / "checkpoint")
    assert draw() == expected


def test_settings_of_the_optimizer_are_the_new_runs(folder: Path, tmp_path: Path) -> None:
    before = make_backend(folder, optimizer={"weight_decay": 0.1, "beta2": 0.99})
    train(before, range(1))
    before.save(tmp_path / "checkpoint")
    after = make_backend(folder, optimizer={"weight_decay": 0.3, "beta2": 0.9})
    after.load(tmp_path / "checkpoint")
    assert {group["weight_decay"] for group in after.optimizer.param_groups} == {0.3, 0.0}
    assert {group["betas"][1] for group in after.optimizer.param_groups} == {0.9}


def test_corrupt_file_is_a_valueerror(folder: Path, tmp_path: Path) -> None:
    """A corrupt file raises ValueError even without the digest check of CheckpointStore.verify."""
    backend = make_backend(folder)
    train(backend, range(1))
    for name in (".metadata", "__0_0.distcp", "provenance.json"):
        checkpoint = tmp_path / name.strip(".")
        backend.save(checkpoint)
        path = checkpoint / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ValueError, match=rf"checkpoint {checkpoint} cannot be read.*resume="):
            backend.load(checkpoint)
        path.unlink()
        with pytest.raises(ValueError, match=rf"checkpoint {checkpoint} cannot be read.*resume="):
            backend.load(checkpoint)
    with pytest.raises(ValueError, match=r"nothing_here cannot be read"):
        backend.load(tmp_path / "nothing_here")


def copy_with(folder: Path, copy: Path, **values: object) -> None:
    """Copies a model folder and changes keys of its config.json."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | values))


def test_checkpoint_of_another_model_is_a_valueerror(folder: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "untied", tied=False)
    copy_with(folder, tmp_path / "scaled", rope_scaling={"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0})
    backend = make_backend(folder)
    train(backend, range(1))
    backend.save(tmp_path / "checkpoint")
    other_backends = (
        (make_backend(tmp_path / "scaled"), "rotary_scaling=None there, {'factor': 2.0} here"),
        (make_backend(tmp_path / "untied"), "tied_embeddings=True there, False here"),
        (make_backend(folder, dtype="bfloat16"), "dtype=float32 there, bfloat16 here"),
        (make_critic(folder), "head=policy there, critic here"),
    )
    for other_backend, problem in other_backends:
        with pytest.raises(ValueError, match=rf"checkpoint .* is of another model: {problem}.*resume=null"):
            other_backend.load(tmp_path / "checkpoint")


def test_tells_what_made_it(folder: Path, tmp_path: Path) -> None:
    backend = make_backend(folder)
    train(backend, range(2))
    backend.save(tmp_path)
    provenance = read_provenance(tmp_path)
    assert (provenance.family, provenance.head, provenance.dtype, provenance.world_size) == (
        "qwen3",
        "policy",
        "float32",
        1,
    )
    assert (provenance.step, provenance.updates) == (2, 2)
    assert provenance.layout == {"dp": 1, "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": 1}
    assert provenance.libraries["torch"] == torch.__version__
    assert abs(datetime.fromisoformat(provenance.time) - datetime.now(UTC)) < timedelta(minutes=5)


def test_a_copy_is_written_while_training_goes_on(folder: Path, tmp_path: Path) -> None:
    backend = make_backend(folder, distributed_optimizer=True)
    train(backend, range(2))
    backend.save(tmp_path / "now")
    backend.copy_state()
    with ThreadPoolExecutor(1) as thread:
        train(backend, range(2, 3))  # training continues during the checkpoint and must not change the copied state
        written = thread.submit(backend.write_copy, tmp_path / "later")
        train(backend, range(3, 5))
        written.result(timeout=300)
    now, later = StoredFolder(tmp_path / "now"), StoredFolder(tmp_path / "later")
    for now_entry, later_entry in zip(stored(now), stored(later), strict=True):
        assert now_entry[0] == later_entry[0]
        torch.testing.assert_close(now_entry[1], later_entry[1], atol=0, rtol=0, equal_nan=True, msg=now_entry[0])
    expected = dict(backend.export())
    backend.load(tmp_path / "later")
    train(backend, range(2, 5))
    assert_same_bits(dict(backend.export()), expected)


def test_full_disk_is_an_oserror_and_leaves_nothing(folder: Path, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("3m")
    backend = make_backend(folder)
    train(backend, range(1))
    store = CheckpointStore(disk / "checkpoints", keep_last=2)
    old = store.write(1, writers=backend.save, meta={})
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    for room in (0, 4_096, 8_192, 400_000, 800_000, 1_330_000):
        ballast = disk / "ballast"
        ballast.write_bytes(b"b" * (free - room))
        with pytest.raises(OSError, match=r"step_00000002 was not written: .* bytes are free"):
            store.write(2, writers=backend.save, meta={})
        ballast.unlink()
        assert [path.name for path in (disk / "checkpoints").iterdir()] == ["step_00000001"]
    store.verify(old)
    backend.load(old)


def run_two(folder: Path, output: Path, *arguments: object) -> list[tuple[int, str]]:
    sharded, checkpoint, what = arguments
    settings = json.dumps({"sharded": bool(sharded), "checkpoint": str(checkpoint), "what": what})
    return run_ranks("dp_rank.py", [(folder, output, settings)] * 2)


def test_two_ranks_go_on_to_the_bit(folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    weights = {}
    for what in ("save", "load"):
        ended = run_two(folder, tmp_path / what, 1, checkpoint, what)
        assert [status for status, _ in ended] == [0, 0], ended
        weights[what] = load_file(tmp_path / f"{what}.safetensors")
        assert "random streams start anew" not in ended[0][1]
    assert_same_bits(weights["load"], weights["save"])


def test_a_rank_whose_disk_is_slow_is_waited_for(folder: Path, tmp_path: Path) -> None:
    ended = run_two(folder, tmp_path / "weights", 0, tmp_path / "checkpoint", "slow")
    assert [status for status, _ in ended] == [0, 0], ended
    assert read_provenance(tmp_path / "checkpoint").world_size == 2


def test_a_missing_rank_ends_the_wait(folder: Path, tmp_path: Path) -> None:
    ended = run_two(folder, tmp_path / "unused", 0, tmp_path / "checkpoint", "absent")
    assert ended[0][0] != 0 and ended[1][0] == 0
    problem = ended[0][1].rsplit(f"save {tmp_path / 'checkpoint'}: trainer rank 0 waited up to", 1)
    # If gloo notices the loss in the barrier, it names the rank. If the connection closed before, it names the address.
    assert len(problem) == 2 and any(words in problem[1] for words in ("Ranks 1 failed", "Connection closed"))
