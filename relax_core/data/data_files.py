"""Reads the data rows of a file by number, checks each, and stores its prompt and answer under "prompt" and "answer".

A data row is checked when it is read. A row that cannot be used raises `BadRow`, and the others stay usable. For a
JSONL file only the offsets of its lines are kept in memory, for a Parquet file one row group at a time. A CSV file and
a JSON list are kept in memory as a whole.
"""

from __future__ import annotations

import codecs
import csv
import shlex
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from relax_core.config.modality_shares import TEXT
from relax_core.contracts.data import BadRow, DataRow
from relax_core.data.row_media import (
    TEXT_ONLY,
    MediaColumns,
    is_content,
    prompt_modality,
    row_with_sources,
    without_base64,
)


class RowFile(Protocol):
    """Holds data rows by number, 0..len-1."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> DataRow:
        """Returns a data row. Raises `BadRow` if it cannot be used."""

    def where(self, number: int) -> str:
        """Returns file and line of a data row, for an error about it."""

    def modality(self, number: int) -> str:
        """Returns the modality of a data row, from its prompt alone; a malformed row counts as text."""


@dataclass(frozen=True, kw_only=True)
class RowKeys:
    """Names the keys of a data row: its prompt, its answer, and the columns with media.

    ``row_group_bytes`` is the largest row group of a Parquet file with such columns.
    """

    prompt: str
    answer: str
    media: MediaColumns = TEXT_ONLY
    row_group_bytes: int = 1 << 28


def open_rows(path: Path, keys: RowKeys) -> RowFile:
    """Opens a .jsonl, .json, .csv or .parquet file.

    Raises ValueError for a file that does not exist, has another suffix or no rows; for a Parquet file that is
    malformed, lacks a column, or has row groups that are too large; and for a malformed JSON list or CSV file.
    """
    if path.suffix not in _READERS:
        raise ValueError(f"data file {path}: unknown suffix {path.suffix!r}. Use one of: {', '.join(_READERS)}.")
    if not path.is_file():
        raise ValueError(f"data file {path}: no such file.")
    rows = _READERS[path.suffix](path, keys)
    if len(rows) == 0:
        raise ValueError(f"data file {path}: it has no rows.")
    return rows


class JsonlRows:
    """Holds the data rows of a file with one JSON object on each line. Blank lines are skipped."""

    def __init__(self, path: Path, keys: RowKeys) -> None:
        self._path, self._keys = path, keys
        self._offsets, self._lines = array("q"), array("q")
        offset = 0
        with path.open("rb") as file:
            if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:  # some editors write it at the beginning
                offset = len(codecs.BOM_UTF8)
            file.seek(offset)
            for line_number, line in enumerate(file, start=1):
                if line.strip():
                    self._offsets.append(offset)
                    self._lines.append(line_number)
                offset += len(line)
        self._file = path.open("rb")

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, number: int) -> str:
        """Returns file and line of a data row."""
        return f"{self._path}, line {self._lines[number]}"

    def modality(self, number: int) -> str:
        """Returns the modality of a data row."""
        self._file.seek(self._offsets[number])
        try:
            row = msgspec.json.decode(self._file.readline(), type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return TEXT
        return prompt_modality(row.get(self._keys.prompt), self._keys.media)

    def __getitem__(self, number: int) -> DataRow:
        self._file.seek(self._offsets[number])
        return self._parse(self._file.readline(), self._lines[number])

    def _parse(self, line: bytes, line_number: int) -> DataRow:
        where = f"{self._path}, line {line_number}"
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRow.because("malformed", f"{where}: not a JSON object: {error}") from error
        return check_row(row, self._keys, where=where)


class RowsInMemory:
    """Holds data rows that are all in memory.

    Each entry is (file and line, data row), or (file and line, (one word, text)) for a row that cannot be used.
    """

    def __init__(self, rows: Sequence[tuple[str, Mapping[str, Any] | tuple[str, str]]], keys: RowKeys) -> None:
        self._rows, self._keys = rows, keys

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, number: int) -> str:
        """Returns file and line of a data row."""
        return self._rows[number][0]

    def modality(self, number: int) -> str:
        """Returns the modality of a data row."""
        row = self._rows[number][1]
        return TEXT if isinstance(row, tuple) else prompt_modality(row.get(self._keys.prompt), self._keys.media)

    def __getitem__(self, number: int) -> DataRow:
        where, row = self._rows[number]
        if isinstance(row, tuple):
            word, why = row
            raise BadRow.because(word, f"{where}: {why}")
        return check_row(row, self._keys, where=where)


def read_json_list(path: Path, keys: RowKeys) -> RowsInMemory:
    """Reads a .json file that holds one list of objects."""
    text = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        found = msgspec.json.decode(text, type=list[Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        lines = " With an object on each line it is a .jsonl file." if text.lstrip().startswith(b"{") else ""
        raise ValueError(f"data file {path}: not a JSON list of objects: {error}.{lines}") from error
    rows = [(f"{path}, row {number}", _object(row)) for number, row in enumerate(found)]
    return RowsInMemory(rows, keys)


def _object(row: Any) -> dict[str, Any] | tuple[str, str]:
    return row if isinstance(row, dict) else ("malformed", f"not a JSON object: {_short(row)}")


def read_csv(path: Path, keys: RowKeys) -> RowsInMemory:
    """Reads a .csv file with the columns' names in its first line. Every value is text."""
    csv.field_size_limit(sys.maxsize)
    rows: list[tuple[str, Mapping[str, Any] | tuple[str, str]]] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                fields = len(row) - (None in row)
                wrong = ("fields", f"it has another number of fields than the first line, {fields}.")
                rows.append((where, wrong if None in row or None in row.values() else row))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {reader.line_num}: not CSV in UTF-8: {error}") from error
    return RowsInMemory(rows, keys)


class ParquetRows:
    """Holds the data rows of a Parquet file.

    A row group is read when one of its rows is read; the last one stays in memory.
    """

    def __init__(self, path: Path, keys: RowKeys) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path, self._keys = path, keys
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"data file {path}: not a Parquet file: {error}") from error
        metadata = self._file.metadata
        self._starts = [0]
        for group in range(metadata.num_row_groups):
            self._starts.append(self._starts[-1] + metadata.row_group(group).num_rows)
        columns = self._file.schema_arrow.names
        for key in (keys.prompt, keys.answer):
            if key not in columns:
                raise ValueError(_missing(f"data file {path}", key, columns))
        for kind, key in keys.media.columns.items():
            if key not in columns:
                known = ", ".join(sorted(columns))
                raise ValueError(f"data.media_keys.{kind}={key}: {path} has no such column; it has {known}.")
        if keys.media.columns:
            _check_row_groups(path, metadata, keys.row_group_bytes)
        self._loaded: tuple[int, Any] | None = None
        self._prompts: tuple[int, list[Any]] | None = None  # of one row group, without its other columns

    def __len__(self) -> int:
        return self._starts[-1]

    def where(self, number: int) -> str:
        """Returns file and number of a data row."""
        return f"{self._path}, row {number}"

    def modality(self, number: int) -> str:
        """Returns the modality of a data row. Only the column of the prompts is read."""
        group = bisect_right(self._starts, number) - 1
        if self._prompts is None or self._prompts[0] != group:
            table = self._file.read_row_group(group, columns=[self._keys.prompt])
            self._prompts = (group, table.column(self._keys.prompt).to_pylist())
        return prompt_modality(self._prompts[1][number - self._starts[group]], self._keys.media)

    def __getitem__(self, number: int) -> DataRow:
        group = bisect_right(self._starts, number) - 1
        if self._loaded is None or self._loaded[0] != group:
            self._loaded = (group, self._file.read_row_group(group))
        row = self._loaded[1].slice(number - self._starts[group], 1).to_pylist()[0]
        return check_row(row, self._keys, where=self.where(number))


def _check_row_groups(path: Path, metadata: Any, most_bytes: int) -> None:
    """Raises ValueError for a row group that is too large: to read one row, the whole group is read."""
    sizes = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    largest = max(sizes, key=lambda group: group.total_byte_size, default=None)
    if largest is None or largest.num_rows == 1 or largest.total_byte_size <= most_bytes:
        return
    rows = max(1, most_bytes * largest.num_rows // (2 * largest.total_byte_size))
    code = (
        f"import pyarrow.parquet as p; f = p.ParquetFile({str(path)!r}); "
        f"w = p.ParquetWriter({str(path.with_suffix('.small.parquet'))!r}, f.schema_arrow); "
        f"[w.write_batch(b) for b in f.iter_batches({rows})]; w.close()"
    )
    raise ValueError(
        f"data file {path}: its largest row group has {largest.total_byte_size / 1e6:.1f} MB, more than "
        f"data.row_group_mb={most_bytes / 1e6:g}, and each row of a shuffled file reads a whole one. This writes the "
        f"same rows in smaller groups: python -c {shlex.quote(code)}"
    )


_READERS: dict[str, Callable[[Path, RowKeys], RowFile]] = {
    ".jsonl": JsonlRows,
    ".json": read_json_list,
    ".csv": read_csv,
    ".parquet": ParquetRows,
}


def check_row(row: Mapping[str, Any], keys: RowKeys, *, where: str) -> DataRow:
    """Returns the data row with its prompt under "prompt" and its answer, as text, under "answer".

    Media are `MediaSource`s in the content parts of the prompt. Other keys stay as they are.

    Raises `BadRow` with a text that starts with ``where``.
    """
    for key in (keys.prompt, keys.answer):
        if key not in row:
            raise BadRow.because("missing_key", _missing(where, key, row))
    prompt, answer = row[keys.prompt], row[keys.answer]
    if not (isinstance(prompt, str) and prompt) and not _is_conversation(prompt):
        raise BadRow.because(
            "prompt",
            f"{where}: {keys.prompt}={_short(prompt)} is neither text nor a list of messages with role and content.",
        )
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise BadRow.because("answer", f"{where}: {keys.answer}={_short(answer)} is neither text nor a number.")
    if keys.media.columns or not (isinstance(prompt, str) or all(isinstance(m["content"], str) for m in prompt)):
        row = row_with_sources(row, keys.media, where=where, prompt_key=keys.prompt)
    return {**row, "prompt": row[keys.prompt], "answer": str(answer)}


def _is_conversation(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(
            isinstance(message, dict) and isinstance(message.get("role"), str) and is_content(message.get("content"))
            for message in prompt
        )
    )


def _missing(where: str, key: str, present: Any) -> str:
    return (
        f"{where}: no key {key!r}; its keys are {', '.join(sorted(present))}. "
        "Set data.prompt_key and data.answer_key to yours."
    )


def _short(value: Any) -> str:
    text = without_base64(repr(value))
    return text if len(text) <= 60 else text[:57] + "..."
