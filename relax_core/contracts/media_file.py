"""Reads and writes the file of one media item: the item's record and tensors. Readers map the file without a copy.

Layout: 8 bytes of magic, the length of the record as uint32, the record (`MediaItem` as msgpack), zeros up to a
multiple of 64 bytes, the tensors. The file's name is the item's digest.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from relax_core.contracts.media import MediaGone, MediaItem, MediaTensor

_MAGIC = b"RLXMEDIA"
_ALIGN = 64
_DIGEST = re.compile(r"[0-9a-f]{32}")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MediaItem)


def node_folder(folder: Path, node_id: str) -> Path:
    """Returns the media folder of a Ray node; ``folder`` is the run's media folder."""
    return folder.with_name(f"{folder.name}-{node_id}")


def is_digest(name: object) -> bool:
    """Returns whether an untrusted name has the form of an item's digest; only such names may become paths."""
    return isinstance(name, str) and _DIGEST.fullmatch(name) is not None


def item_digest(settings: bytes, tensors: Mapping[str, np.ndarray]) -> str:
    """Returns the digest over settings, names, dtypes, shapes and content of C-ordered tensors."""
    state = xxhash.xxh3_128(settings)
    for name, tensor in tensors.items():
        state.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        state.update(np.ascontiguousarray(tensor).data)
    return state.hexdigest()


def write_item(folder: Path, item: MediaItem, tensors: Mapping[str, np.ndarray]) -> MediaItem:
    """Writes an item's file, named by the digest. Returns the item with the locations of its tensors and its size.

    The write is atomic. If the file exists already, it is written again with the same content.
    """
    places: list[MediaTensor] = []
    end = 0
    for name, tensor in tensors.items():
        end = -(-end // _ALIGN) * _ALIGN
        places.append(
            MediaTensor(name=name, dtype=str(tensor.dtype), shape=list(tensor.shape), offset=end, nbytes=tensor.nbytes)
        )
        end += tensor.nbytes
    placed = msgspec.structs.replace(item, tensors=places, nbytes=end)
    record = _encoder.encode(placed)
    first = -(-(12 + len(record)) // _ALIGN) * _ALIGN
    part = folder / f"{item.digest}.{os.getpid()}.part"
    with part.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(_MAGIC + len(record).to_bytes(4, "little") + record)
        for place, tensor in zip(places, tensors.values(), strict=True):
            file.seek(first + place.offset)
            file.write(np.ascontiguousarray(tensor).data)
        file.truncate(first + end)
    os.replace(part, folder / item.digest)
    return placed


def read_item(data: memoryview) -> tuple[MediaItem, dict[str, np.ndarray]]:
    """Returns the record and read-only views of the tensors from the bytes of an item's file.

    Raises ValueError for bytes that are not an item.
    """
    length = int.from_bytes(data[8:12], "little")
    if bytes(data[:8]) != _MAGIC or len(data) < 12 + length:
        raise ValueError("these bytes are no media item of Relax.")
    try:
        item = _decoder.decode(data[12 : 12 + length])
    except msgspec.DecodeError as error:
        raise ValueError(f"these bytes are no media item of Relax: {error}") from error
    first = -(-(12 + length) // _ALIGN) * _ALIGN
    tensors = {}
    for place in item.tensors:
        start = first + place.offset
        try:
            tensor = np.frombuffer(data[start : start + place.nbytes], dtype=place.dtype).reshape(place.shape)
        except TypeError as error:  # an unknown dtype
            raise ValueError(f"these bytes are no media item of Relax: {error}") from error
        tensor.flags.writeable = False
        tensors[place.name] = tensor
    return item, tensors


class FolderReader:
    """Maps the files of a media folder. It implements `MediaReader`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, digest: str) -> tuple[MediaItem, dict[str, np.ndarray]]:
        """Returns the record and the tensors of an item. The file stays mapped while a tensor is in use.

        Raises ValueError if ``digest`` is not a digest, and `MediaGone` if the folder has no such item.
        """
        if not is_digest(digest):
            raise ValueError(f"media {digest!r}: a digest has 32 hexadecimal digits.")
        try:
            with (self._folder / digest).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise MediaGone(f"media {digest}: there is no such item in {self._folder}.") from None
        return read_item(memoryview(mapped))

    def fetch(self, items: Sequence[MediaItem]) -> None:
        """Returns at once, because the folder has every item."""

    def tensors(self, item: MediaItem) -> Mapping[str, np.ndarray]:
        """Returns read-only views of an item's tensors by name."""
        return self.open(item.digest)[1]


class NodeReader:
    """Maps the files of a node's media folder, and fetches missing items. It implements `MediaReader`.

    ``fetch(digests)`` copies items from other nodes. It returns when the folder has the items, or raises `MediaGone`.
    """

    def __init__(self, folder: Path, *, fetch: Callable[[Sequence[str]], None]) -> None:
        self._folder = folder
        self._files = FolderReader(folder)
        self._fetch = fetch

    def fetch(self, items: Sequence[MediaItem]) -> None:
        """Waits until the node has these items. One call of ``fetch`` copies all missing items."""
        if lacking := [item.digest for item in items if not (self._folder / item.digest).exists()]:
            self._fetch(lacking)

    def tensors(self, item: MediaItem) -> Mapping[str, np.ndarray]:
        """Returns read-only views of an item's tensors by name."""
        self.fetch([item])
        return self._files.tensors(item)
