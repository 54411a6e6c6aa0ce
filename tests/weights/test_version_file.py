"""Tests that readers of a weight version get exactly the written tensors, and that damage is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from relax_core.contracts.engine import WeightManifest
from relax_core.weights.folder_stream import read_safetensors
from relax_core.weights.version_file import DigestMismatch, read_weights, tensors_digest, write_weights

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
BUCKET = 64


def some_tensors() -> list[tuple[str, torch.Tensor]]:
    """Makes tensors of odd sizes that misalign the next tensor, a scalar, an empty tensor and a transposed tensor."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (10 * torch.randn(shape, generator=generator)).to(dtype)

    tensors = [(f"t.{dtype}", random(3, 7, dtype=dtype)) for dtype in DTYPES]
    tensors += [("scalar", random()), ("empty", torch.empty(0, 4)), ("transposed", random(4, 6).t())]
    return tensors


def write(folder: Path, **changes: int) -> WeightManifest:
    return write_weights(folder / "w.bin", version=7, tensors=some_tensors(), **({"bucket_bytes": BUCKET} | changes))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("bucket_bytes", [1, BUCKET, 1 << 20])
def test_round_trip_of_every_dtype(tmp_path: Path, bucket_bytes: int) -> None:
    manifest = write(tmp_path, bucket_bytes=bucket_bytes)
    found = list(read_weights(manifest))
    assert [name for name, _ in found] == [name for name, _ in some_tensors()]
    for (name, got), (_, expected) in zip(found, some_tensors(), strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape, name
        assert torch.equal(got, expected), name
    assert manifest.total_bytes == sum(t.numel() * t.element_size() for _, t in some_tensors())
    assert len(manifest.digests) == -(-manifest.total_bytes // bucket_bytes)
    assert [path.name for path in tmp_path.iterdir()] == ["w.bin"]


@pytest.mark.parametrize("bucket_bytes", [1, BUCKET, 100, 1 << 20])
def test_the_digest_needs_no_file(tmp_path: Path, bucket_bytes: int) -> None:
    manifest = write(tmp_path, bucket_bytes=bucket_bytes)
    assert tensors_digest(some_tensors(), bucket_bytes=bucket_bytes) == manifest.digest


def test_names_shapes_and_dtypes_are_in_the_digest() -> None:
    value = torch.arange(6, dtype=torch.int32)
    digests = {
        tensors_digest([("a", value)]),
        tensors_digest([("b", value)]),
        tensors_digest([("a", value.view(2, 3))]),
        tensors_digest([("a", value.view(torch.float32))]),
    }
    assert len(digests) == 4


@pytest.mark.parametrize("header_room", [8, 1 << 12])
def test_safetensors_reads_the_file(tmp_path: Path, header_room: int) -> None:
    """The library's reader requires aligned tensors, so all tensors have one dtype.

    A header that is too large for the reserved space moves the tensors.
    """
    tensors = [(name, value) for name, value in some_tensors() if value.dtype == torch.float32]
    manifest = write_weights(
        tmp_path / "model.safetensors", version=7, tensors=tensors, bucket_bytes=BUCKET, header_room=header_room
    )
    found = list(read_safetensors(tmp_path))
    assert [name for name, _ in found] == [name for name, _ in tensors]
    assert all(torch.equal(got, expected) for (_, got), (_, expected) in zip(found, tensors, strict=True))
    assert tensors_digest(found, bucket_bytes=BUCKET) == manifest.digest
    assert [name for name, _ in read_weights(manifest)] == [name for name, _ in tensors]


@pytest.mark.parametrize("bucket", [0, 3, -1])
def test_a_flipped_byte_names_its_bucket(tmp_path: Path, bucket: int) -> None:
    manifest = write(tmp_path)
    bucket %= len(manifest.digests)
    flip(Path(manifest.path), manifest.data_offset + bucket * BUCKET)
    with pytest.raises(DigestMismatch, match=rf"version 7, bucket {bucket}: digest \w+, published as \w+"):
        next(read_weights(manifest))


@pytest.mark.parametrize("keep", [0, 1, BUCKET, 3 * BUCKET, -1])
def test_a_file_of_another_length_is_refused(tmp_path: Path, keep: int) -> None:
    manifest = write(tmp_path)
    path = Path(manifest.path)
    whole = manifest.data_offset + manifest.total_bytes
    keep %= whole
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DigestMismatch, match=rf"has {keep} bytes, published as {whole}"):
        next(read_weights(manifest))
    path.write_bytes(path.read_bytes() + b"\0" * (whole - keep + 1))
    with pytest.raises(DigestMismatch, match=rf"has {whole + 1} bytes"):
        next(read_weights(manifest))


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    first = manifest.tensors[0]
    swapped = [manifest.tensors[1], first, *manifest.tensors[2:]]
    for changed in (
        {"tensors": [msgspec.structs.replace(first, name="other"), *manifest.tensors[1:]]},
        {"tensors": [msgspec.structs.replace(first, shape=[7, 3]), *manifest.tensors[1:]]},
        {"tensors": [msgspec.structs.replace(first, dtype="int32"), *manifest.tensors[1:]]},
        {"tensors": swapped},
        {"tensors": manifest.tensors[:-1]},
        {"digests": manifest.digests[:-1]},
        {"digest": "0" * 32},
    ):
        with pytest.raises(DigestMismatch, match="the manifest's own digest does not agree"):
            next(read_weights(msgspec.structs.replace(manifest, **changed)))
    for changed in ({"bucket_bytes": 2 * BUCKET}, {"total_bytes": manifest.total_bytes - 1}):
        with pytest.raises(DigestMismatch):
            next(read_weights(msgspec.structs.replace(manifest, **changed)))


def test_an_offset_of_its_own_changes_nothing(tmp_path: Path) -> None:
    """Readers that map the file use offsets computed from the verified shapes."""
    manifest = write(tmp_path)
    shifted = [msgspec.structs.replace(spec, offset=0, nbytes=4) for spec in manifest.tensors]
    found = dict(read_weights(msgspec.structs.replace(manifest, tensors=shifted)))
    assert all(torch.equal(found[name], value) for name, value in some_tensors())


def test_a_writer_that_fails_leaves_the_earlier_file(tmp_path: Path) -> None:
    manifest = write(tmp_path)

    def broken() -> object:
        yield "a", torch.zeros(3)
        raise RuntimeError("the export failed")

    with pytest.raises(RuntimeError, match="the export failed"):
        write_weights(Path(manifest.path), version=8, tensors=broken())  # type: ignore[arg-type]
    assert len(list(read_weights(manifest))) == len(some_tensors())
