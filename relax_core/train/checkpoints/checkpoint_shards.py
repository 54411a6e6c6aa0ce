"""Stores tensors of many ranks in torch.distributed.checkpoint's format; any other ranks can read them.

torch's own sharded types support regular grids over a mesh. A piece here is any block of a global tensor, so a rank can
store its memory as it is: a slice of the optimizer's flat buffer, or a few heads of a fused projection.
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

from relax_core.train.checkpoints.plain_index import PlainIndexReader
from relax_core.train.checkpoints.synced_stream import SyncedFiles

WEIGHTS = "weights/"  # The names of a model's own tensors begin with this.


@dataclass(frozen=True, slots=True)
class Block:
    """Holds ``data``, the part of a global tensor that begins at ``offsets``."""

    offsets: tuple[int, ...]
    data: Tensor


@dataclass(slots=True)
class Pieces:
    """Holds one rank's blocks of a global tensor of ``shape``.

    torch.distributed.checkpoint calls the dunder methods for a value that is not a tensor.
    """

    shape: tuple[int, ...]
    blocks: list[Block] = field(default_factory=list)

    def copied(self) -> Pieces:
        """Returns a copy in host memory."""
        return Pieces(self.shape, [Block(block.offsets, block.data.to("cpu", copy=True)) for block in self.blocks])

    def size(self) -> torch.Size:
        """Returns the shape of the global tensor."""
        return torch.Size(self.shape)

    def at(self, index: MetadataIndex) -> Tensor:
        """Returns the block at the index's offsets."""
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
        """Omits the check for tensors on torch's meta device, which supports only torch's own types."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        pieces: Pieces = self.state_dict[index.fqn]
        return pieces.at(index)


def write_pieces(folder: Path, pieces: Mapping[str, Pieces], *, group: dist.ProcessGroup) -> None:
    """Writes the blocks of all ranks into ``folder`` and raises on every rank if one of them cannot write.

    No two ranks may give the same block. The call is collective over ``group``.
    """
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    writer.fs = SyncedFiles()
    dcp.save(
        dict(pieces),
        storage_writer=writer,
        planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
    )


def read_pieces(folder: Path, pieces: Mapping[str, Pieces], *, group: dist.ProcessGroup) -> None:
    """Fills the blocks of each rank from files of any ranks; the call is collective over ``group``."""
    dcp.load(
        dict(pieces),
        storage_reader=PlainIndexReader(folder),
        planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
    )


class StoredFolder:
    """Reads what `write_pieces` wrote in one process that is not a rank."""

    def __init__(self, folder: Path) -> None:
        self._reader = PlainIndexReader(folder)
        self._metadata: Metadata = self._reader.read_metadata()

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Returns the shape and dtype of every tensor in the folder."""
        return {
            name: stored
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def read(self, names: Sequence[str], *, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, whole tensor) in the order of ``names``; reads ``bucket_bytes`` or one tensor at a time."""
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
