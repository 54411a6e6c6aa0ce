"""Reads the data rows of an Arrow file by number, such as the files of `datasets.save_to_disk`.

The file is mapped into memory, so a row group (an Arrow record batch) takes no memory until its rows are read. A
compressed record batch could unpack to any size, so it is refused. Offsets are checked before the first row of a record
batch is read, because a wrong offset would read memory outside the file.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow

from relax_core.contracts.untrusted_files import check_regular
from relax_core.data.data_files import RowKeys
from relax_core.data.parquet_rows import TableRows

_FILE_MARK = b"ARROW1\0\0"  # at the start of the file format, followed by the same messages as in the stream format
_AS_PARQUET = "Write the rows as Parquet, for example with to_parquet of datasets"
_COMPRESSION = 3  # number of this field in Arrow's table RecordBatch; the header is field 2 of the table Message
_HEADER = 2


class ArrowRows(TableRows):
    """Holds the data rows of an Arrow file, in the stream or the file format.

    Raises ValueError for a file that is malformed, lacks a column, or has compressed or dictionary-encoded values.
    """

    def __init__(self, path: Path, keys: RowKeys) -> None:
        check_regular(path)
        self._batches: list[pyarrow.RecordBatch] = []
        self._checked: dict[int, str] = {}  # the problem of each row group that was read, "" for none
        try:
            file = pyarrow.memory_map(str(path))
            if file.read(len(_FILE_MARK)) != _FILE_MARK:
                file.seek(0)
            schema = self._read_batches(path, pyarrow.ipc.MessageReader.open_stream(file))
        except (pyarrow.ArrowException, OSError, struct.error) as error:
            raise ValueError(f"data file {path}: not an Arrow file: {error}. {_AS_PARQUET}.") from error
        super().__init__(path, keys, schema=schema, counts=[batch.num_rows for batch in self._batches])

    def _read_batches(self, path: Path, messages: pyarrow.ipc.MessageReader) -> pyarrow.Schema:
        found = iter(messages)
        first = next(found, None)
        if first is None:
            raise pyarrow.ArrowInvalid("it is empty")
        schema = pyarrow.ipc.read_schema(first)
        for message in found:
            if message.type != "record batch" or _is_compressed(message.metadata.to_pybytes()):
                raise ValueError(
                    f"data file {path}: it has compressed or dictionary-encoded values, which are not read from Arrow "
                    f"files. {_AS_PARQUET}."
                )
            self._batches.append(pyarrow.ipc.read_record_batch(message, schema))
        return schema

    def _read(self, group: int, *, columns: list[str] | None = None) -> pyarrow.Table | str:
        batch = self._batches[group]
        if group not in self._checked:
            try:
                batch.validate(full=True)
                self._checked[group] = ""
            except (pyarrow.ArrowException, OSError) as error:
                self._checked[group] = f"its row group cannot be read: {error}"
        if self._checked[group]:
            return self._checked[group]
        table = pyarrow.Table.from_batches([batch])
        return table if columns is None else table.select(columns)


def _is_compressed(metadata: bytes) -> bool:
    """Returns whether the metadata of a record batch (a FlatBuffer) has the field compression."""
    message = _field(metadata, struct.unpack_from("<I", metadata)[0], _HEADER)
    if message is None:
        return False
    return _field(metadata, message + struct.unpack_from("<I", metadata, message)[0], _COMPRESSION) is not None


def _field(metadata: bytes, table: int, number: int) -> int | None:
    """Returns the position of a field of a table in a FlatBuffer; None if the table lacks the field."""
    fields = table - struct.unpack_from("<i", metadata, table)[0]
    at = 4 + 2 * number
    if fields < 0 or at >= struct.unpack_from("<H", metadata, fields)[0]:
        return None
    offset = struct.unpack_from("<H", metadata, fields + at)[0]
    return table + offset if offset else None
