"""Tests weight versions with LoRA factors: the file has the factors only, and readers get merged tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from relax_core.contracts.engine import WeightManifest
from relax_core.weights.folder_stream import read_safetensors
from relax_core.weights.lora_merge import LoraFactors
from relax_core.weights.publisher import WeightPublisher
from relax_core.weights.transports import CollectiveTransport, SharedMemoryTransport
from relax_core.weights.version_copy import reading_copy
from relax_core.weights.version_file import DigestMismatch, read_weights
from relax_core.weights.version_writer import FACTORS, FROZEN, FROZEN_FOLDER, VersionWriter
from tests.contracts.engine.harness import hf_weights, make_model

OUT, IN, RANK, SCALE = 6, 4, 2, 0.5


def base(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm": (IN,), "q.weight": (OUT, IN), "k.weight": (OUT, IN)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def factors(version: int, dtype: torch.dtype = torch.float32) -> list[LoraFactors]:
    generator = torch.Generator().manual_seed(version)
    a, b = torch.randn(RANK, IN, generator=generator), torch.randn(OUT, RANK, generator=generator)
    return [LoraFactors("q.weight", a.to(dtype), b.to(dtype), SCALE)]


def expected(version: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Returns all tensors of a version; the sum is computed in float64 and rounded once."""
    tensors = base(dtype)
    ((_, a, b, scale),) = factors(version, dtype)
    tensors["q.weight"] = (tensors["q.weight"].double() + scale * (b.double() @ a.double())).to(dtype)
    return tensors


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6 if tensor.dtype == torch.float32 else 8e-3)


def write(folder: Path, writer: VersionWriter, version: int, dtype: torch.dtype = torch.float32) -> WeightManifest:
    (folder / str(version)).mkdir(parents=True)
    tensors = [] if writer.has_frozen else base(dtype).items()
    return writer.write(folder / str(version), version, tensors, factors=factors(version, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_version_has_the_factors_only_and_reads_as_merged_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    writer = VersionWriter(tmp_path, frozen=list(base()), model_folder=None)
    first, second = write(tmp_path, writer, 1, dtype), write(tmp_path, writer, 2, dtype)
    assert first.frozen == second.frozen and first.digest != second.digest
    for version, manifest in ((1, first), (2, second)):
        assert [path.name for path in (tmp_path / str(version)).iterdir()] == [FACTORS]
        assert manifest.total_bytes == RANK * (IN + OUT) * dtype.itemsize
        assert_equal(dict(read_weights(manifest)), expected(version, dtype))
        trained = dict(read_weights(manifest, with_frozen=False))
        assert_equal(trained, {"q.weight": expected(version, dtype)["q.weight"]})
        assert manifest.kept == {"norm", "k.weight"} and manifest.kept_key == first.kept_key


def test_other_factored_tensors_are_another_key(tmp_path: Path) -> None:
    """An engine that merged q must read q again if a version with the same base merges only k."""
    writer = VersionWriter(tmp_path, frozen=list(base()), model_folder=None)
    first = write(tmp_path, writer, 1)
    (tmp_path / "2").mkdir()
    other = [factors(2)[0]._replace(name="k.weight")]
    second = writer.write(tmp_path / "2", 2, [], factors=other)
    assert first.frozen == second.frozen and first.kept_key != second.kept_key


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("file", [Path("1", FACTORS), Path(FROZEN_FOLDER, FROZEN)])
@pytest.mark.parametrize("with_frozen", [True, False])
def test_a_changed_byte_of_factors_or_base_is_noticed(tmp_path: Path, file: Path, with_frozen: bool) -> None:
    manifest = write(tmp_path, VersionWriter(tmp_path, frozen=list(base()), model_folder=None), 1)
    assert len(dict(read_weights(manifest, with_frozen=with_frozen))) == (3 if with_frozen else 1)
    flip(tmp_path / file)
    with pytest.raises(DigestMismatch, match="bucket 0"):
        next(read_weights(manifest, with_frozen=with_frozen))


@pytest.mark.parametrize("change", [{}, {"q.weight": 2 * SCALE}, {"k.weight": SCALE}])
def test_the_digest_covers_names_and_scales_of_factors(tmp_path: Path, change: dict[str, float]) -> None:
    manifest = write(tmp_path, VersionWriter(tmp_path, frozen=list(base()), model_folder=None), 1)
    with pytest.raises(DigestMismatch, match="manifest's own digest"):
        next(read_weights(msgspec.structs.replace(manifest, factors=change)))


def test_a_manifest_survives_json(tmp_path: Path) -> None:
    manifest = write(tmp_path, VersionWriter(tmp_path, frozen=list(base()), model_folder=None), 1)
    decoded = msgspec.json.decode(msgspec.json.encode(manifest), type=WeightManifest)
    assert decoded == manifest
    assert_equal(dict(read_weights(decoded)), expected(1))


def misfit(name: str = "q.weight", *, a: Any = (RANK, IN), b: Any = (OUT, RANK), scale: float = SCALE) -> LoraFactors:
    return LoraFactors(name, torch.ones(a), torch.ones(b), scale)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (misfit(a=(RANK, IN + 1)), "do not fit the tensor's shape"),
        (misfit(b=(OUT, RANK + 1)), "do not fit the tensor's shape"),
        (misfit("norm"), "do not fit the tensor's shape"),
        (misfit(scale=float("inf")), "finite scale"),
    ],
)
def test_factors_that_do_not_fit_are_refused(tmp_path: Path, wrong: LoraFactors, problem: str) -> None:
    (tmp_path / "1").mkdir()
    writer = VersionWriter(tmp_path, frozen=list(base()), model_folder=None)
    manifest = writer.write(tmp_path / "1", 1, base().items(), factors=[wrong])
    with pytest.raises(ValueError, match=f"{wrong.name}.*{problem}"):
        next(read_weights(manifest))


def test_only_transports_by_file_take_factors(tmp_path: Path) -> None:
    transports: dict[str, Callable[[], Any]] = {
        "file": SharedMemoryTransport,
        "broadcast": lambda: CollectiveTransport("gloo", host="", timeout_s=1),
    }
    takes = {}
    for name, make in transports.items():
        publisher = WeightPublisher(tmp_path / name, list, transport=make(), frozen=list(base()))
        takes[name] = publisher.takes_factors
        publisher.close()
    assert takes == {"file": True, "broadcast": False}


def test_a_copy_for_servers_without_relax_has_merged_tensors(tmp_path: Path) -> None:
    model, source, target = tmp_path / "model", tmp_path / "memory", tmp_path / "copies" / "0"
    model.mkdir()
    (model / "config.json").write_text("{}")
    publisher = WeightPublisher(
        source, list, transport=SharedMemoryTransport(), model_folder=model, frozen=list(base())
    )
    for version in range(1, 4):
        tensors = [] if publisher.has_frozen else base().items()
        publisher.publish(version, tensors, factors=factors(version))
        with reading_copy(source, target, reader="engine", deadline_s=5.0) as copied:
            folder = Path(copied.path).parent
            assert folder.is_relative_to(target) and copied.version == version and not copied.factors
            assert (folder / "config.json").read_text() == "{}"
            for found in (dict(read_weights(copied)), dict(read_safetensors(folder))):
                assert_equal(found, expected(version))
    publisher.close()


def test_bytes_of_a_version_of_the_tiny_model(tmp_path: Path) -> None:
    """Compares the file with a count from the layer sizes: 2 layers of hidden 64, MLP 192, 4+2+2 heads of 16."""
    weights = hf_weights(make_model(None, seed=0))
    names = [name for name, tensor in weights if "_proj." in name]
    rank = 4
    adapted = [
        LoraFactors(name, torch.ones(rank, tensor.shape[1]), torch.zeros(tensor.shape[0], rank), 1.0)
        for name, tensor in weights
        if name in names
    ]
    writer = VersionWriter(tmp_path, frozen=[name for name, _ in weights], model_folder=None)
    (tmp_path / "1").mkdir()
    manifest = writer.write(tmp_path / "1", 1, weights, factors=adapted)
    sizes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 192), (64, 192), (192, 64)]
    assert manifest.total_bytes == 2 * sum(rank * (wide + high) for wide, high in sizes) * 4
    assert len(manifest.tensors) == 2 * len(names) == 28
    assert manifest.frozen is not None
    assert manifest.frozen.total_bytes == sum(tensor.nbytes for _, tensor in weights)
