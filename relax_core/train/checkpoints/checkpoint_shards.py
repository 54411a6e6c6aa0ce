"""Tensors of many ranks in torch.distributed.checkpoint's format: each writes its pieces, any others read any others.

Its own sharded types know regular grids over a mesh. A piece here is any block of a global tensor, so that a rank can
store what it has as it lies in memory: a slice of the optimizer's flat buffer, a few heads of a fused projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from relax_core.train.checkpoints.synced_stream import SyncedFiles

WEIGHTS = "weights/"  # how the names of a model's own tensors begin


@dataclass(frozen=True, slots=True)
class Block:
    """``data``: the part of a global tensor that begins at ``offsets``."""

    offsets: tuple[int, ...]
    data: Tensor


@dataclass(slots=True)
class Pieces:
    """One rank's blocks of a global tensor of ``shape``. Its dunder methods are what torch.distributed.checkpoint asks
    of a value that is no tensor."""

    shape: tuple[int, ...]
    blocks: list[Block] = field(default_factory=list)

    def copied(self) -> Pieces:
        """The same in host memory of its own."""
        return Pieces(self.shape, [Block(block.offsets, block.data.to("cpu", copy=True)) for block in self.blocks])

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def at(self, index: MetadataIndex) -> Tensor:
        return next(block.data for block in self.blocks if block.offsets == index.offset)

    def __create_write_items__(self, name: str, value: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(block.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(block.data), size=self.size()
                ),
            )
            for block, chunk in zip(self.blocks, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(block.offsets), block.data.size()) for block in self.blocks]


class _SavePlanner(dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].at(index)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Without the look for tensors on torch's meta device, which knows only its own types."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        pieces: Pieces = self.state_dict[index.fqn]
        return pieces.at(index)


def write_pieces(folder: Path, pieces: Mapping[str, Pieces], *, group: dist.ProcessGroup) -> None:
    """Collective over ``group``: returns once the blocks of all ranks are in ``folder``, and raises on all of them
    where one could not write. No two ranks may give the same block."""
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    writer.fs = SyncedFiles()
    dcp.save(
        dict(pieces),
        storage_writer=writer,
        planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
    )


def read_pieces(folder: Path, pieces: Mapping[str, Pieces], *, group: dist.ProcessGroup) -> None:
    """Collective over ``group``: fills the blocks of each rank, whoever wrote them."""
    dcp.load(
        dict(pieces),
        storage_reader=dcp.FileSystemReader(folder),
        planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
    )


class StoredFolder:
    """What `write_pieces` wrote, read by one process that is no rank."""

    def __init__(self, folder: Path) -> None:
        self._reader = dcp.FileSystemReader(folder)
        self._metadata: Metadata = self._reader.read_metadata()

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape and dtype of every tensor in it."""
        return {
            name: stored
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def read(self, names: Sequence[str], *, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) in the order of ``names``; ``bucket_bytes`` of them, or one, are read at a time."""
        stored = self.tensors()
        bucket: dict[str, Tensor] = {}
        held = 0
        for name in names:
            tensor = torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
            if bucket and held + tensor.nbytes > bucket_bytes:
                yield from self._filled(bucket)
                bucket, held = {}, 0
            bucket[name] = tensor
            held += tensor.nbytes
        yield from self._filled(bucket)

    def _filled(self, bucket: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(bucket), self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        yield from bucket.items()
