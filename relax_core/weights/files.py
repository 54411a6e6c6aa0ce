"""A weight version as one flat file with a digest for each bucket: written by the trainer, mapped by every receiver.

On one host the file lies in shared memory, so that publishing is one copy and receiving another.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch
import xxhash

from relax_core.contracts.engine import TensorSpec, WeightManifest

BUCKET_BYTES = 64 << 20


class DigestMismatch(RuntimeError):
    """The bytes at hand are not those that were published; the text names the version and the bucket."""


def _names_digest(tensors: Iterable[TensorSpec], digests: Iterable[str]) -> str:
    header = msgspec.json.encode([[(t.name, t.dtype, t.shape) for t in tensors], list(digests)])
    return xxhash.xxh3_128_hexdigest(header)


def _bucket_digests(buffer: memoryview, bucket_bytes: int) -> list[str]:
    return [
        xxhash.xxh3_128_hexdigest(buffer[start : start + bucket_bytes]) for start in range(0, len(buffer), bucket_bytes)
    ]


def write_weights(
    path: Path, *, version: int, tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> WeightManifest:
    """Writes all tensors to ``path``, one at a time, and says what was written. It appears whole or not at all."""
    specs: list[TensorSpec] = []
    offset = 0
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        for name, tensor in tensors:
            data = tensor.detach().cpu().contiguous()
            raw = data.view(-1).view(torch.uint8).numpy().data
            dtype = str(data.dtype).removeprefix("torch.")
            specs.append(TensorSpec(name=name, dtype=dtype, shape=list(data.shape), offset=offset, nbytes=raw.nbytes))
            file.write(raw)
            offset += raw.nbytes
    with partial.open("rb") as written, mmap.mmap(written.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        digests = _bucket_digests(view, bucket_bytes)
        view.release()
    os.replace(partial, path)
    return WeightManifest(
        version=version,
        path=str(path),
        total_bytes=offset,
        bucket_bytes=bucket_bytes,
        digests=digests,
        digest=_names_digest(specs, digests),
        tensors=specs,
    )


def read_weights(manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) after every digest agreed; the tensors view the file, so copy what is kept.

    Raises `DigestMismatch` before the first tensor where a bucket, or the manifest itself, does not agree, and
    FileNotFoundError where a newer version has already replaced this one.
    """
    if _names_digest(manifest.tensors, manifest.digests) != manifest.digest:
        raise DigestMismatch(f"weights version {manifest.version}: the manifest's own digest does not agree")
    with open(manifest.path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != manifest.total_bytes:
            raise DigestMismatch(
                f"weights version {manifest.version}: {manifest.path} has {size} bytes, "
                f"published as {manifest.total_bytes}"
            )
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found = _bucket_digests(memoryview(mapped), manifest.bucket_bytes)
    if len(found) != len(manifest.digests):
        raise DigestMismatch(
            f"weights version {manifest.version}: {len(found)} buckets, published as {len(manifest.digests)}"
        )
    for bucket, (expected, got) in enumerate(zip(manifest.digests, found, strict=True)):
        if expected != got:
            raise DigestMismatch(
                f"weights version {manifest.version}, bucket {bucket}: digest {got}, published as {expected}"
            )
    offset = 0
    for spec in manifest.tensors:  # they follow each other; an offset of its own is no part of the digest
        dtype = getattr(torch, spec.dtype)
        count = math.prod(spec.shape)
        tensor = (
            torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
        )
        yield spec.name, tensor.view(spec.shape)
        offset += count * dtype.itemsize


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]], *, bucket_bytes: int = BUCKET_BYTES) -> str:
    """The digest that `write_weights` gives the same tensors in the same order, without a file."""
    specs: list[TensorSpec] = []
    digests: list[str] = []
    bucket, room, offset = xxhash.xxh3_128(), bucket_bytes, 0
    for name, tensor in tensors:
        data = tensor.detach().cpu().contiguous()
        raw = data.view(-1).view(torch.uint8).numpy().data
        dtype = str(data.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name=name, dtype=dtype, shape=list(data.shape), offset=offset, nbytes=raw.nbytes))
        offset += raw.nbytes
        start = 0
        while start < raw.nbytes:
            part = raw[start : start + room]
            bucket.update(part)
            start += part.nbytes
            room -= part.nbytes
            if room == 0:
                digests.append(bucket.hexdigest())
                bucket, room = xxhash.xxh3_128(), bucket_bytes
    if room < bucket_bytes:
        digests.append(bucket.hexdigest())
    return _names_digest(specs, digests)
