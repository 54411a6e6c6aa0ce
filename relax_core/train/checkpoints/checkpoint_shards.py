"""Stores the ranks' tensors in torch.distributed.checkpoint's format; ranks in any other layout can read the files.

torch's sharded types support regular grids over a mesh only. A `Block` is any block of a global tensor, so a rank can
store its memory without rearranging it: a slice of the optimizer's flat buffer, or a few heads of a fused projection.

The format's index is a pickle. torch's reader would call any function that the pickle names, so a checkpoint from an
untrusted source could run code. `PlainIndexReader` creates only objects of the few classes that an index needs.

Files are synced while they are written, so their growth shows the disk's progress (`CheckpointStore.progress`). Without
the syncs the kernel buffers a large part of a file in memory: the file has its full length at once, and shows no
progress while the disk writes. Errors about files name the folder and the fix.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_FULL_BYTES = 1 << 20  # A failed write with fewer free bytes than this is attributed to a full disk.
_UNREADABLE = (OSError, EOFError, ValueError, CheckpointException, pickle.UnpicklingError)


def _causes(error: BaseException) -> list[tuple[BaseException, traceback.StackSummary]]:
    """Returns each rank's error with the error's stack."""
    if isinstance(error, CheckpointException):
        return list(error.failures.values())
    return [(error, traceback.extract_tb(error.__traceback__))]


def _is_torch_file_error(error: BaseException, frames: traceback.StackSummary) -> bool:
    """Returns True for the RuntimeErrors that torch's zip reader and writer raise when the disk fails."""
    return isinstance(error, RuntimeError) and frames[-1].filename == torch.serialization.__file__


@contextmanager
def write_errors_as_oserror(folder: Path) -> Iterator[None]:
    """Raises OSError if the disk failed on any rank."""
    try:
        yield
    except (CheckpointException, RuntimeError) as error:
        for cause, frames in _causes(error):
            if isinstance(cause, OSError):
                raise OSError(cause.errno, f"{folder}: {cause.strerror}") from error
            if _is_torch_file_error(cause, frames):
                number = errno.ENOSPC if shutil.disk_usage(folder).free < _FULL_BYTES else errno.EIO
                raise OSError(number, f"{folder}: {os.strerror(number)}: {cause}") from error
        # CheckpointException is not an Exception, so `except Exception` would miss it.
        if isinstance(error, CheckpointException):
            raise RuntimeError(f"{folder}: {error}") from error
        raise


@contextmanager
def read_errors_as_valueerror(folder: Path) -> Iterator[None]:
    """Raises ValueError if files differ from the files that were written."""
    try:
        yield
    except (RuntimeError, *_UNREADABLE) as error:
        cause, frames = _causes(error)[0]
        if not isinstance(error, _UNREADABLE) and not _is_torch_file_error(cause, frames):
            raise
        raise ValueError(
            f"checkpoint {folder} cannot be read: {type(cause).__name__}: {cause}. It is corrupt, or of another model. "
            "Resume from an older checkpoint with resume=<its folder>."
        ) from error


_CLASSES: dict[tuple[str, str], Callable[..., Any]] = {
    ("pathlib", "PosixPath"): PosixPath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    **{
        (index.__name__, kind.__name__): kind
        for kind in (
            *(Metadata, index.MetadataIndex, index.StorageMeta, index.TensorProperties, index.TensorStorageMetadata),
            *(index.ChunkStorageMetadata, index.BytesStorageMetadata, index._MEM_FORMAT_ENCODING),
        )
    },
}


class PlainIndexReader(dcp.FileSystemReader):
    """Reads a folder like torch's reader, but creates only objects of `_CLASSES` from the index.

    Raises ``pickle.UnpicklingError`` if the index names any other class, or a file outside the folder.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the index of the folder."""
        with Path(self._get_metadata_path(kwargs.get("rank"))).open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise pickle.UnpicklingError("it is not the index of a checkpoint")
        for stored in found.storage_data.values():
            plain = isinstance(stored, filesystem._StorageInfo) and isinstance(stored.relative_path, str)
            if not plain or Path(stored.relative_path).name != stored.relative_path or stored.transform_descriptors:
                raise pickle.UnpicklingError("it names a file outside of its folder, or one in another format")
        about = getattr(found, "storage_meta", None) or index.StorageMeta()
        about.load_id = self.load_id
        found.storage_meta = about
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns one of the classes of an index, or a dtype of torch."""
        if (known := _CLASSES.get((module, name))) is not None:
            return known
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint has")


SYNC_BYTES = 256 << 20


class SyncedFiles(FileSystem):
    """Opens synced streams for `torch.distributed.checkpoint.FileSystemWriter`."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Opens a synced stream for writing, and torch's own stream for reading."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _SyncedStream(io.FileIO(path, "wb")) as stream:
            yield stream


class _SyncedStream(io.BufferedWriter):
    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self._unsynced = 0

    def write(self, data: ReadableBuffer, /) -> int:
        written = super().write(data)
        self._unsynced += written
        if self._unsynced >= SYNC_BYTES:
            self.flush()
            os.fdatasync(self.fileno())
            self._unsynced = 0
        return written


WEIGHTS = "weights/"  # The names of a model's own tensors begin with this prefix.


@dataclass(frozen=True, slots=True)
class Block:
    """Holds ``data``, the part of a global tensor that begins at ``offsets``."""

    offsets: tuple[int, ...]
    data: Tensor


@dataclass(slots=True)
class Pieces:
    """Holds one rank's blocks of a global tensor of ``shape``.

    torch.distributed.checkpoint calls the dunder methods of a value that is not a tensor.
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
        """Returns the data of the block that begins at the offsets of ``index``."""
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
        """Skips torch's check for tensors on the meta device, because the check supports only torch's own types."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        pieces: Pieces = self.state_dict[index.fqn]
        return pieces.at(index)


def write_pieces(folder: Path, pieces: Mapping[str, Pieces], *, group: dist.ProcessGroup) -> None:
    """Writes the blocks of all ranks into ``folder``; if one rank cannot write, every rank raises.

    Two ranks must not pass the same block. The call is collective over ``group``.
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
    """Fills this rank's blocks from the files of all ranks that wrote; the call is collective over ``group``."""
    dcp.load(
        dict(pieces),
        storage_reader=PlainIndexReader(folder),
        planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
    )


class StoredFolder:
    """Reads the files of `write_pieces` in a process that is not a rank."""

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
