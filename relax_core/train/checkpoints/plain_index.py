"""Reads the index of a checkpoint in torch.distributed.checkpoint's format, which is a pickle, without running code.

torch's own reader would call whatever the pickle names, so a checkpoint of somebody else would be a program. This
reader makes only the few classes that an index consists of.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.metadata import Metadata

_CLASSES: dict[tuple[str, str], Callable[..., Any]] = {
    ("pathlib", "PosixPath"): PosixPath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    **{
        (index.__name__, one.__name__): one
        for one in (
            *(Metadata, index.MetadataIndex, index.StorageMeta, index.TensorProperties, index.TensorStorageMetadata),
            *(index.ChunkStorageMetadata, index.BytesStorageMetadata, index._MEM_FORMAT_ENCODING),
        )
    },
}


class PlainIndexReader(dcp.FileSystemReader):
    """Reads a folder as torch's reader does, but makes no other objects of its index than those of `_CLASSES`.

    Raises ``pickle.UnpicklingError`` for an index that names anything else, or a file outside of the folder.
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
