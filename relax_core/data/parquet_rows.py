"""Reads the data rows of a Parquet file by number, within memory limits.

A file of a few kilobytes may contain gigabytes of values, because repeated values are stored once and pages are
compressed. Therefore the sizes in the file's metadata are checked first. Repeated texts of a row group are also stored
once in memory. The memory of each row group and the size of each row are limited even if the metadata is wrong.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from relax_core.config.modality import TEXT
from relax_core.contracts.data import BadRow, DataRow
from relax_core.contracts.untrusted_files import check_regular
from relax_core.contracts.untrusted_values import check_depth
from relax_core.data.data_files import (
    RowKeys,
    check_columns,
    check_row,
    missing_key,
    offline_modality,
    too_large,
    without_filled_nulls,
)
from relax_core.data.layouts import check_layout
from relax_core.data.row_formats import WrittenNumber, messages_of, value_at
from relax_core.data.row_media import prompt_modality

TEXT_GROUP_BYTES = 2 << 30  # limit of a row group without media columns
_NUMBER_BYTES = 32  # memory of a number in a row as a Python object
_VALUE_BYTES = 8  # smallest memory of a column's value
_MIN_GROUP_BYTES = 64 << 20  # always allowed, because the buffers of a small group are larger than the group
_TEXTS = (pyarrow.BinaryArray, pyarrow.StringArray, pyarrow.LargeBinaryArray, pyarrow.LargeStringArray)
_BATCH_ROWS = 256  # rows that are read between two checks of the memory


class TableRows(ABC):
    """Holds the data rows of a file with an Arrow ``schema`` and ``counts`` of rows in each row group.

    A row group is read when one of its rows is read; only the last read row group stays in memory. Raises ValueError
    for a file that lacks a column.
    """

    def __init__(self, path: Path, keys: RowKeys, *, schema: pyarrow.Schema, counts: Iterable[int]) -> None:
        self._path, self._keys, self._schema = path, keys, schema
        self._starts = [0, *accumulate(counts)]
        columns = schema.names
        check_columns(path, columns)
        fields = {field.name: field.type for field in schema}
        inner = {
            name: {kind.field(number).name: None for number in range(kind.num_fields)}
            for name, kind in fields.items()
            if pyarrow.types.is_struct(kind)
        }
        if keys.layout is not None:
            check_layout({**dict.fromkeys(columns), **inner}, keys.layout, where=f"data file {path}")
        for key in (keys.prompt, keys.answer) if keys.layout is None else ():
            if self._column(key) not in columns:
                raise ValueError(missing_key(f"data file {path}", key, {**dict.fromkeys(columns), **inner}))
        for kind, key in keys.media.columns.items():
            if self._column(key) not in columns:
                known = ", ".join(sorted(columns))
                raise ValueError(f"data.media_keys.{kind}={key}: {path} has no such column; it has {known}.")
        self._loaded: tuple[int, pyarrow.Table | str] | None = None
        self._prompts: tuple[int, pyarrow.Table | str] | None = None  # the prompt column of one row group

    @abstractmethod
    def _read(self, group: int, *, columns: list[str] | None = None) -> pyarrow.Table | str:
        """Returns a row group with these columns (None for all), or the reason why it cannot be read."""

    def __len__(self) -> int:
        return self._starts[-1]

    def where(self, number: int) -> str:
        """Returns file and number of a data row."""
        return f"{self._path}, row {number}"

    def modality(self, number: int) -> str:
        """Returns the modality of a data row. Only the prompt column is read, except for rows without engines."""
        if self._keys.offline is not None:
            return offline_modality(self, number)
        group = bisect_right(self._starts, number) - 1
        if self._prompts is None or self._prompts[0] != group:
            self._prompts = group, self._read(group, columns=[self._column(self._keys.prompt)])
        try:
            row = self._row(self._prompts[1], group, number)
        except BadRow:
            return TEXT
        return prompt_modality(messages_of(value_at(row, self._keys.prompt)), self._keys.media)

    def __getitem__(self, number: int) -> DataRow:
        group = bisect_right(self._starts, number) - 1
        if self._loaded is None or self._loaded[0] != group:
            self._loaded = group, self._read(group)
        row = self._row(self._loaded[1], group, number)
        label = value_at(row, self._keys.answer)
        if self._keys.offline is None and isinstance(label, float) and (bits := self._label_bits()) < 64:
            row[self._keys.answer] = WrittenNumber(label, str(numpy.dtype(f"float{bits}").type(label)))
        return check_row(row, self._keys, where=self.where(number))

    def _column(self, key: str) -> str:
        """Returns the column of a key, which may be dotted."""
        return key if key in self._schema.names else key.partition(".")[0]

    def _label_bits(self) -> int:
        """Returns the size in bits of the floats in the answer column."""
        kind, key = self._schema.field(self._column(self._keys.answer)).type, self._keys.answer
        for part in key.split(".")[1:] if self._column(key) != key else ():
            kind = kind.field(part).type if pyarrow.types.is_struct(kind) else kind.value_type
        return int(kind.bit_width)

    def _row(self, table: pyarrow.Table | str, group: int, number: int) -> dict[str, Any]:
        where = self.where(number)
        if isinstance(table, str):
            raise BadRow.because("malformed", f"{where}: {table}")
        rows = table.slice(number - self._starts[group], 1)
        if rows.num_rows == 0:
            raise BadRow.because("malformed", f"{where}: its row group has fewer rows than the file says")
        if sum(_decoded_bytes(column.combine_chunks()) for column in rows.columns) > self._keys.row_bytes:
            raise too_large(where, self._keys.row_bytes)
        try:
            row: dict[str, Any] = rows.to_pylist()[0]
            check_depth(row)
        except (ValueError, RecursionError) as error:  # text that is not UTF-8, or a value without a Python type
            raise BadRow.because("malformed", f"{where}: {error}") from error
        return without_filled_nulls(row, self._keys)


class ParquetRows(TableRows):
    """Holds the data rows of a Parquet file.

    Raises ValueError for a file that is malformed, lacks a column or has row groups that are too large.
    """

    def __init__(self, path: Path, keys: RowKeys) -> None:
        check_regular(path)
        try:
            metadata = pyarrow.parquet.read_metadata(path)
            texts = [metadata.schema.column(number) for number in range(metadata.num_columns)]
            repeated = [column.path for column in texts if column.physical_type == "BYTE_ARRAY"]
            self._file = pyarrow.parquet.ParquetFile(path, metadata=metadata, read_dictionary=repeated)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"data file {path}: not a Parquet file: {error}") from error
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        super().__init__(path, keys, schema=self._file.schema_arrow, counts=counts)
        self._most = keys.row_group_bytes if keys.media.columns else TEXT_GROUP_BYTES
        _check_row_groups(path, metadata, self._most)

    def _read(self, group: int, *, columns: list[str] | None = None) -> pyarrow.Table | str:
        """Returns a row group, or the reason why it cannot be read."""
        before, batches = pyarrow.total_allocated_bytes(), []
        most = max(2 * self._most, _MIN_GROUP_BYTES)
        try:
            for batch in self._file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
                batches.append(batch)
                if pyarrow.total_allocated_bytes() - before > most:
                    return f"its row group needs more than {most / 1e6:.0f} MB of memory, twice the limit"
            return pyarrow.Table.from_batches(batches)
        except (pyarrow.ArrowException, OSError, MemoryError) as error:
            return f"its row group cannot be read: {error}"


def _decoded_bytes(array: Any) -> int:
    """Returns the approximate bytes of an Arrow array's values as Python objects, repeated values included."""
    if isinstance(array, pyarrow.ChunkedArray):
        return sum(_decoded_bytes(chunk) for chunk in array.chunks)
    kind = array.type
    if isinstance(array, pyarrow.DictionaryArray):
        lengths = pyarrow.compute.binary_length(array.dictionary)
        return int(pyarrow.compute.sum(lengths.take(array.indices)).as_py() or 0)
    if pyarrow.types.is_struct(kind):
        return sum(_decoded_bytes(field) for field in array.flatten())
    if pyarrow.types.is_map(kind):
        values = array.flatten() if hasattr(array, "flatten") else array
        return _decoded_bytes(values)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        return _NUMBER_BYTES * len(array) + _decoded_bytes(array.flatten())
    if isinstance(array, _TEXTS):
        return int(pyarrow.compute.sum(pyarrow.compute.binary_length(array)).as_py() or 0)
    return _NUMBER_BYTES * len(array)


def _group_bytes(group: Any) -> int:
    """Returns the bytes of a row group in memory according to its metadata; repeated texts count once."""
    columns = [group.column(number) for number in range(group.num_columns)]
    values = sum(max(column.total_uncompressed_size, column.num_values * _VALUE_BYTES) for column in columns)
    return max(int(values), int(group.total_byte_size), int(group.num_rows))


def _check_row_groups(path: Path, metadata: Any, max_bytes: int) -> None:
    """Raises ValueError for a row group that is too large; to read one row, Relax reads the whole row group."""
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    size, rows = max(((_group_bytes(group), group.num_rows) for group in groups), default=(0, 0))
    if size <= max_bytes or (rows == 1 and size <= TEXT_GROUP_BYTES):
        return
    fewer = max(1, max_bytes * rows // (2 * size))
    code = (
        f"import pyarrow.parquet as p; f = p.ParquetFile({str(path)!r}); "
        f"w = p.ParquetWriter({str(path.with_suffix('.small.parquet'))!r}, f.schema_arrow); "
        f"[w.write_batch(b) for b in f.iter_batches({fewer})]; w.close()"
    )
    raise ValueError(
        f"data file {path}: its largest row group has {size / 1e6:.1f} MB, more "
        f"than the {max_bytes / 1e6:g} MB that is allowed, and each row of a shuffled file reads a whole row group. "
        f"This writes the same rows in smaller groups: python -c {shlex.quote(code)}"
    )
