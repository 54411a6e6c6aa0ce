"""Writes and reads a weight version as one safetensors file with a digest for each bucket.

On one host the file is in shared memory: the trainer copies the weights into it, and each engine copies them from it.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
import xxhash

from relax_core.contracts.engine import TensorSpec, WeightManifest
from relax_core.weights.lora_merge import factor_names, merged
from relax_core.weights.safetensors_stream import header_bytes, host_bytes

BUCKET_BYTES = 64 << 20
HEADER_ROOM = 16 << 10
MAX_DIMENSIONS = 8  # maximum number of dimensions of a tensor in a manifest


class DigestMismatch(RuntimeError):
    """Reports that a file's bytes differ from the published bytes; the text names the version and the bucket."""


def _names_digest(
    tensors: Iterable[TensorSpec],
    digests: Iterable[str],
    frozen: WeightManifest | None = None,
    factors: Mapping[str, float] | None = None,
) -> str:
    parts: list[Any] = [[(t.name, t.dtype, t.shape) for t in tensors], list(digests)]
    if frozen is not None:
        parts.append(frozen.digest)
    if factors:
        parts.append(sorted(factors.items()))
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(parts))


def _bucket_digests(buffer: memoryview, bucket_bytes: int) -> list[str]:
    return [
        xxhash.xxh3_128_hexdigest(buffer[start : start + bucket_bytes]) for start in range(0, len(buffer), bucket_bytes)
    ]


def _spec_and_bytes(name: str, tensor: torch.Tensor, *, offset: int) -> tuple[TensorSpec, memoryview]:
    """Returns a tensor's entry in the manifest, and the tensor's bytes in CPU memory."""
    data = tensor.detach().cpu().contiguous()
    raw = host_bytes(data)
    dtype = str(data.dtype).removeprefix("torch.")
    return TensorSpec(name=name, dtype=dtype, shape=list(data.shape), offset=offset, nbytes=raw.nbytes), raw


def write_weights(
    path: Path,
    *,
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int = BUCKET_BYTES,
    header_room: int = HEADER_ROOM,
) -> WeightManifest:
    """Writes tensors to ``path`` one at a time with `WeightFile` and returns their manifest."""
    with WeightFile(path, header_room=header_room) as file:
        for name, tensor in tensors:
            file.add(name, tensor)
        return file.finish(version=version, bucket_bytes=bucket_bytes)


class WeightFile:
    """Writes tensors to ``path`` one at a time. The file appears at ``path`` only when it is complete.

    ``header_room`` is the number of bytes that are reserved for the header before the tensors, because the header's
    size is known only after the last tensor. If the header needs more bytes, all tensors are moved once.
    """

    def __init__(self, path: Path, *, header_room: int = HEADER_ROOM) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._specs: list[TensorSpec] = []
        self._offset = 0
        self._header_room = header_room
        self._file = self._partial.open("w+b")
        self._file.seek(header_room)

    def __enter__(self) -> WeightFile:
        """Returns itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the file. Without `finish` the file stays incomplete."""
        self._file.close()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the next tensor."""
        spec, data = _spec_and_bytes(name, tensor, offset=self._offset)
        self._specs.append(spec)
        self._file.write(data)
        self._offset += spec.nbytes

    def finish(
        self,
        *,
        version: int,
        bucket_bytes: int = BUCKET_BYTES,
        frozen: WeightManifest | None = None,
        factors: Mapping[str, float] | None = None,
    ) -> WeightManifest:
        """Completes the file and returns its manifest.

        ``frozen`` is the manifest of the version's frozen tensors. ``factors`` is `WeightManifest.factors`.
        """
        header = header_bytes(self._specs, room=self._header_room)
        if len(header) > self._header_room:
            _make_room(self._file, before=self._header_room, after=len(header))
        self._file.seek(0)
        self._file.write(header)
        self._file.close()
        digests = []
        if self._offset:
            with (
                self._partial.open("rb") as written,
                mmap.mmap(written.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
                memoryview(mapped) as view,
                view[len(header) :] as data_view,
            ):
                digests = _bucket_digests(data_view, bucket_bytes)
        os.replace(self._partial, self._path)
        return WeightManifest(
            version=version,
            path=str(self._path),
            data_offset=len(header),
            total_bytes=self._offset,
            bucket_bytes=bucket_bytes,
            digests=digests,
            digest=_names_digest(self._specs, digests, frozen, factors),
            tensors=self._specs,
            frozen=frozen,
            factors=dict(factors or {}),
        )


def _make_room(file: BinaryIO, *, before: int, after: int) -> None:
    """Moves all bytes from offset ``before`` on to offset ``after``, starting with the last block."""
    file.flush()
    end = file.tell()
    piece = 16 << 20
    for start in reversed(range(before, end, piece)):
        data = os.pread(file.fileno(), min(piece, end - start), start)
        os.pwrite(file.fileno(), data, start + after - before)


def view_bytes(manifest: WeightManifest) -> torch.Tensor:
    """Returns a view of the bytes of all published tensors, uint8 ``[total_bytes]``, without comparing digests.

    Copy tensors that you keep. Raises FileNotFoundError if the version is old and was removed, `DigestMismatch` if the
    file has another length, and ValueError if it is not a regular file.
    """
    published = manifest.data_offset + manifest.total_bytes
    with open(manifest.path, "rb", opener=_open_nonblocking) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"weights version {manifest.version}: {manifest.path} is not a regular file")
        size = status.st_size
        if size != published:
            raise DigestMismatch(
                f"weights version {manifest.version}: {manifest.path} has {size} bytes, published as {published}"
            )
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)[manifest.data_offset :]


def _open_nonblocking(path: str, flags: int) -> int:
    """Opens a file without blocking; a blocking open of a pipe would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_manifest(manifest: WeightManifest) -> None:
    """Checks a manifest, which may come from the network.

    Raises `DigestMismatch` if its digest differs, and ValueError for an impossible value.
    """
    try:
        digest = _names_digest(manifest.tensors, manifest.digests, manifest.frozen, manifest.factors)
    except OverflowError as error:  # msgspec encodes integers of at most 64 bits.
        raise ValueError(f"weights version {manifest.version}: a tensor has an impossible size: {error}") from error
    if digest != manifest.digest:
        raise DigestMismatch(f"weights version {manifest.version}: the manifest's own digest does not agree")
    total = sum(_tensor_bytes(spec, manifest.version) for spec in manifest.tensors)
    if manifest.data_offset < 0 or manifest.bucket_bytes < 1:
        raise ValueError(f"weights version {manifest.version}: data_offset is below 0, or bucket_bytes is below 1")
    buckets = -(-total // manifest.bucket_bytes)
    if total != manifest.total_bytes or len(manifest.digests) != buckets:
        raise DigestMismatch(
            f"weights version {manifest.version}: {total} bytes in {buckets} buckets, published as "
            f"{manifest.total_bytes} in {len(manifest.digests)}"
        )
    _check_factors(manifest)


def _check_factors(manifest: WeightManifest) -> None:
    """Raises ValueError if a tensor with factors is not a frozen matrix, or if its factors do not fit."""
    if not manifest.factors:
        return
    frozen = {spec.name: spec for spec in manifest.frozen.tensors} if manifest.frozen is not None else {}
    own = {spec.name: spec for spec in manifest.tensors}
    for name, scale in manifest.factors.items():
        weight, a, b = frozen.get(name), *(own.get(factor) for factor in factor_names(name))
        if weight is None or a is None or b is None or not math.isfinite(scale):
            raise ValueError(
                f"weights version {manifest.version}: {repr(name)[:200]} has factors, but its frozen tensor, a factor "
                "or a finite scale is missing"
            )
        shapes = [list(spec.shape) for spec in (weight, a, b)]
        rank = a.shape[0] if a.shape else 0
        if len(weight.shape) != 2 or rank < 1 or shapes[1:] != [[rank, weight.shape[1]], [weight.shape[0], rank]]:
            raise ValueError(
                f"weights version {manifest.version}: the factors of {repr(name)[:200]} have shapes {shapes[1]} and "
                f"{shapes[2]}, which do not fit the tensor's shape {shapes[0]}"
            )


def _tensor_bytes(spec: TensorSpec, version: int) -> int:
    """Returns a tensor's size from its dtype and shape; raises ValueError if they are impossible."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or len(spec.shape) > MAX_DIMENSIONS or min(spec.shape, default=0) < 0:
        raise ValueError(f"weights version {version}: {repr(spec.name)[:200]} has an impossible dtype or shape")
    return math.prod(spec.shape) * dtype.itemsize


def read_weights(
    manifest: WeightManifest, *, with_frozen: bool = True, merge_on: torch.device | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Compares all digests, then yields (name, tensor). The tensors are views of the file: copy tensors that you keep.

    Tensors in `WeightManifest.kept` come first, or are left out. Each tensor with LoRA factors is computed from the
    frozen file and from the factors on the device ``merge_on`` (None: CPU); it is a new tensor, and only one at a
    time is in memory. All errors are raised before the first tensor: `DigestMismatch` if a digest of a bucket or of the
    manifest differs, FileNotFoundError if the version is old and was removed, and ValueError for impossible values in
    the manifest.
    """
    frozen = manifest.frozen
    if frozen is not None and (frozen.frozen is not None or frozen.factors):
        raise ValueError(f"weights version {manifest.version}: its frozen tensors are in more than one file")
    own = _checked_tensors(manifest)
    if frozen is None or not (with_frozen or manifest.factors):
        yield from own
        return
    base: dict[str, torch.Tensor] = {}
    for name, tensor in _checked_tensors(frozen):
        if name in manifest.factors:
            base[name] = tensor
        elif with_frozen:
            yield name, tensor
    factors: dict[str, torch.Tensor] = {}
    names = {factor for name in manifest.factors for factor in factor_names(name)}
    for name, tensor in own:
        if name in names:
            factors[name] = tensor
        else:
            yield name, tensor
    for name, scale in manifest.factors.items():
        parts = (base[name], *(factors[factor] for factor in factor_names(name)))
        weight, a, b = parts if merge_on is None else (part.to(merge_on) for part in parts)
        yield name, merged(weight, a, b, scale)


def _checked_tensors(manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Compares all digests of the manifest's file, without the file of frozen tensors, and returns its tensors."""
    _check_manifest(manifest)
    data = view_bytes(manifest)
    found = _bucket_digests(data.numpy().data, manifest.bucket_bytes)
    for bucket, (expected, got) in enumerate(zip(manifest.digests, found, strict=True)):
        if expected != got:
            raise DigestMismatch(
                f"weights version {manifest.version}, bucket {bucket}: digest {got}, published as {expected}"
            )
    # The tensors are contiguous. Offsets in the manifest are ignored, because no digest covers them.
    return cut_tensors(data, [(spec.name, getattr(torch, spec.dtype), spec.shape) for spec in manifest.tensors])


def cut_tensors(
    data: torch.Tensor, tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields views of ``data``, uint8 ``[bytes]``: the concatenated bytes of ``tensors`` (name, dtype, shape).

    A tensor is copied if its offset is not a multiple of its dtype's size.
    """
    start = 0
    for name, dtype, shape in tensors:
        end = start + math.prod(shape) * dtype.itemsize
        part = data[start:end]
        if (data.storage_offset() + start) % dtype.itemsize:
            part = part.clone()
        yield name, part.view(dtype).view(shape)
        start = end


class TensorsDigest:
    """Computes the same digest of tensors as `write_weights`, in the same order of tensors, without a file."""

    def __init__(self, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        self._specs: list[TensorSpec] = []
        self._digests: list[str] = []
        self._bucket, self._room, self._offset = xxhash.xxh3_128(), bucket_bytes, 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds the next tensor."""
        spec, raw = _spec_and_bytes(name, tensor, offset=self._offset)
        self._specs.append(spec)
        self._offset += raw.nbytes
        start = 0
        while start < raw.nbytes:
            part = raw[start : start + self._room]
            self._bucket.update(part)
            start += part.nbytes
            self._room -= part.nbytes
            if self._room == 0:
                self._digests.append(self._bucket.hexdigest())
                self._bucket, self._room = xxhash.xxh3_128(), self._bucket_bytes

    def hexdigest(self) -> str:
        """Returns the digest of the tensors so far."""
        last = [self._bucket.hexdigest()] if self._room < self._bucket_bytes else []
        return _names_digest(self._specs, [*self._digests, *last])


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]], *, bucket_bytes: int = BUCKET_BYTES) -> str:
    """Returns the `TensorsDigest` of ``tensors``."""
    digest = TensorsDigest(bucket_bytes=bucket_bytes)
    for name, tensor in tensors:
        digest.add(name, tensor)
    return digest.hexdigest()
