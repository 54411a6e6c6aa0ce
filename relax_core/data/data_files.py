"""Reads data rows by number from JSONL, JSON, CSV, Parquet and Arrow files, and validates each row.

A data row is validated when it is read. Its prompt is stored under the key "prompt" and its answer under "answer". An
unusable row raises `BadRow`; all further rows stay usable. The memory holds only the line offsets of a JSONL file, one
row group of a Parquet file (`relax_core/data/parquet_rows.py`), and complete CSV files and JSON lists. Compressed files
are unpacked to temporary files. A row that is too large or nested too deeply is not read and is a bad row.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import shlex
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from relax_core.config.choices import LastAssistant
from relax_core.config.modality import TEXT, modality_of_row
from relax_core.contracts.algorithm import Offline
from relax_core.contracts.data import BadRow, DataRow
from relax_core.contracts.untrusted_files import open_regular, read_regular
from relax_core.contracts.untrusted_values import decode_json, holds_huge_integer, shown
from relax_core.data.compressed_files import COMPRESSED, unpacked
from relax_core.data.layouts import OfflineKeys, offline_row
from relax_core.data.row_formats import (
    FLOAT_TEXT,
    MessagesOfText,
    WrittenNumber,
    is_conversation,
    label_text,
    messages_of,
    value_at,
    without_null_keys,
    without_nulls,
    written_number,
)
from relax_core.data.row_media import (
    TEXT_ONLY,
    MediaColumns,
    prompt_modality,
    row_with_sources,
    without_base64,
)

MAX_ROW_BYTES, MAX_MEDIA_ROW_BYTES = 32 << 20, 512 << 20  # limits of a row without and with media columns
MAX_WHOLE_BYTES = 512 << 20  # limit of a file that is completely in memory
_MAX_LINE_BYTES = MAX_MEDIA_ROW_BYTES
_PIECE_BYTES = 1 << 20  # bytes that are read at a time to find line ends
_SHOWN = 200  # most characters of a value in an error, before base64 is removed
_MISSING = object()
_UNPACK = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zst": "zstd -d", ".zip": "unzip"}
_LINES = (".jsonl", ".json")  # suffixes that may precede those of compressed files


class RowFile(Protocol):
    """Holds data rows by number, 0..len-1."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> DataRow:
        """Returns a data row. Raises `BadRow` if it cannot be used."""

    def where(self, number: int) -> str:
        """Returns file and line of a data row, for errors about the row."""

    def modality(self, number: int) -> str:
        """Returns the modality of a data row, only from its prompt; "text" for a malformed row."""


@dataclass(frozen=True, kw_only=True)
class RowKeys:
    """Names the keys of a data row: its prompt, its answer, and the columns with media.

    If no column has the name of a dotted key, the key reads a nested value (`value_at`). ``row_group_bytes`` is the
    size of the largest allowed row group in a Parquet file with media columns. With ``may_be_empty`` the answer may be
    an empty text. ``last_assistant`` is the value of data.last_assistant. ``offline`` is the kind of rows that are
    trained without engines (`relax_core/data/layouts.py`); None for prompts.
    """

    prompt: str
    answer: str
    media: MediaColumns = TEXT_ONLY
    last_assistant: LastAssistant | None = None
    row_group_bytes: int = 32_000_000
    may_be_empty: bool = False
    offline: Offline | None = None

    @property
    def layout(self) -> OfflineKeys | None:
        """Returns the keys of rows that are trained without engines, or None."""
        if self.offline is None:
            return None
        return OfflineKeys(kind=self.offline, prompt=self.prompt, answer=self.answer, media=self.media)

    @property
    def row_bytes(self) -> int:
        """Returns the maximum number of bytes of a row."""
        return max(self.row_group_bytes, MAX_MEDIA_ROW_BYTES) if self.media.columns else MAX_ROW_BYTES


def open_rows(path: Path, keys: RowKeys) -> RowFile:
    """Opens a .jsonl, .json, .csv, .parquet or .arrow file; the first two may be compressed (.jsonl.gz, .json.zst).

    Raises ValueError for a missing file, an unknown suffix and a file without rows; for a Parquet or Arrow file that is
    malformed, lacks a column, or has row groups that are too large; and for a malformed JSON list or CSV file.
    """
    if not path.exists():
        raise ValueError(f"data file {path}: no such file.{_of_hub(path)}")
    suffix = data_suffix(path)
    if suffix not in READERS and path.suffix in _UNPACK:
        raise ValueError(
            f"data file {path}: such a compressed file is not read. Unpack it: {_UNPACK[path.suffix]} "
            f"{shlex.quote(str(path))}, then name the file without {path.suffix}."
        )
    if suffix not in READERS:
        raise ValueError(f"data file {path}: unknown suffix {suffix!r}. Use one of: {', '.join(READERS)}.")
    try:
        rows = READERS[suffix](path, keys)
    except RecursionError as error:
        raise ValueError(f"data file {path}: it is nested too deeply.") from error
    if len(rows) == 0:
        raise ValueError(f"data file {path}: it has no rows.")
    return rows


def data_suffix(path: Path) -> str:
    """Returns the suffix that determines the reader of a file, such as .csv or .jsonl.gz."""
    inner = Path(path.stem).suffix
    return inner + path.suffix if path.suffix in COMPRESSED and inner in _LINES else path.suffix


def _of_hub(path: Path) -> str:
    """Returns a download hint if a path looks like the name of a dataset on the Hugging Face hub, else ""."""
    try:
        parts = path.relative_to(Path.cwd()).parts
    except ValueError:
        return ""
    if len(parts) != 2 or data_suffix(path) in READERS or path.parent.exists():
        return ""
    name = "/".join(parts)
    return (
        f" If {name} is a dataset of the Hugging Face hub, download it: hf download {name} --repo-type dataset "
        f"--local-dir {parts[1]}; then name its files, such as data.path='{parts[1]}/**/train*.parquet'."
    )


class JsonlRows:
    """Holds the data rows of a file with one JSON object on each line. Blank lines are skipped.

    ``file`` has the content of ``path`` if it is compressed.
    """

    def __init__(self, path: Path, keys: RowKeys, file: BinaryIO | None = None) -> None:
        self._path, self._keys = path, keys
        self._offsets, self._lines = array("q"), array("q")
        self._file = open_regular(path) if file is None else file
        offset = 0
        if self._file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:  # some editors write this mark at the beginning
            offset = len(codecs.BOM_UTF8)
        self._file.seek(offset)
        for line_number, (count, blank) in enumerate(_lines(self._file, path), start=1):
            if not blank:
                self._offsets.append(offset)
                self._lines.append(line_number)
            offset += count
        if len(self._offsets) == 1:
            self._file.seek(self._offsets[0])
            if self._file.read(1) == b"[":
                raise ValueError(f"data file {path}: its one line is a JSON list. Name it {path.stem}.json.")

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, number: int) -> str:
        """Returns file and line of a data row."""
        return f"{self._path}, line {self._lines[number]}"

    def modality(self, number: int) -> str:
        """Returns the modality of a data row."""
        if self._keys.offline is not None:
            return offline_modality(self, number)
        try:
            row = self._row(number)
        except BadRow:
            return TEXT
        return prompt_modality(messages_of(value_at(row, self._keys.prompt)), self._keys.media)

    def __getitem__(self, number: int) -> DataRow:
        return check_row(self._row(number), self._keys, where=self.where(number))

    def _row(self, number: int) -> dict[str, Any]:
        self._file.seek(self._offsets[number])
        most = self._keys.row_bytes
        line = self._file.readline(most + 1)
        if len(line) > most:
            raise too_large(self.where(number), most)
        try:
            return _read_object(line, self._keys)
        except ValueError as error:
            raise BadRow.because("malformed", f"{self.where(number)}: {error}") from error


def _read_object(content: bytes, keys: RowKeys) -> dict[str, Any]:
    """Returns the object in a JSON text. Raises ValueError for other content and for a duplicate key.

    A float at the key ``keys.answer`` becomes a `WrittenNumber`.
    """
    try:
        row = decode_json(content, dict[str, Any])
    except ValueError as error:
        raise ValueError(f"not a JSON object: {error}") from error
    if any(content.count(f'"{key}"'.encode()) > 1 for key in row):  # a duplicate key, or a text like a key
        json.loads(content, object_pairs_hook=_check_keys)
    if isinstance(value_at(row, keys.answer), float):
        row[keys.answer] = written_number(content, keys.answer)
    return row


def _check_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
        raise ValueError(f"the key {twice[0]!r} is there twice. Drop or rename one.")
    return dict(pairs)


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bool]]:
    """Yields each line's number of bytes, and whether the line is blank. A long line is read in pieces.

    Raises ValueError for a line of more than `_MAX_LINE_BYTES`.
    """
    count, blank = 0, True
    while piece := file.readline(_PIECE_BYTES):
        count += len(piece)
        if count > _MAX_LINE_BYTES:
            raise ValueError(
                f"data file {path}: a line has more than {_MAX_LINE_BYTES / 1e6:.0f} MB. Write one JSON object on "
                "each line."
            )
        blank = blank and not piece.strip()
        if piece.endswith(b"\n"):
            yield count, blank
            count, blank = 0, True
    if count:
        yield count, blank


class RowsInMemory:
    """Holds data rows in memory.

    Each entry is (file and line, data row); for an unusable row, (file and line, (reason, text)).
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
        if self._keys.offline is not None:
            return offline_modality(self, number)
        row = self._rows[number][1]
        if isinstance(row, tuple):
            return TEXT
        return prompt_modality(messages_of(value_at(row, self._keys.prompt)), self._keys.media)

    def __getitem__(self, number: int) -> DataRow:
        where, row = self._rows[number]
        if isinstance(row, tuple):
            word, why = row
            raise BadRow.because(word, f"{where}: {why}")
        return check_row(row, self._keys, where=where)


def open_compressed(path: Path, keys: RowKeys) -> RowFile:
    """Opens a compressed file with an object on each line or, if its content begins with "[", with one list."""
    file = unpacked(path)
    start = file.read(_PIECE_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    if not start.startswith(b"["):
        return JsonlRows(path, keys, file)
    with file:
        content = file.read(MAX_WHOLE_BYTES + 1)
    if len(content) > MAX_WHOLE_BYTES:
        raise ValueError(
            f"data file {path}: a list of more than {MAX_WHOLE_BYTES / 1e6:.0f} MB is not read. Write one object on "
            "each line."
        )
    return _json_list(path, keys, content)


def read_json_list(path: Path, keys: RowKeys) -> RowsInMemory:
    """Reads a .json file with one list of objects."""
    return _json_list(path, keys, read_regular(path, max_bytes=MAX_WHOLE_BYTES))


def _json_list(path: Path, keys: RowKeys, content: bytes) -> RowsInMemory:
    text = content.removeprefix(codecs.BOM_UTF8)
    try:
        found = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        lines = (
            " With an object on each line it is a .jsonl file; a list within an object is not read."
            if text.lstrip().startswith(b"{")
            else ""
        )
        raise ValueError(f"data file {path}: not a JSON list of objects: {error}.{lines}") from error
    rows = [(f"{path}, row {number}", _object(bytes(row), keys)) for number, row in enumerate(found)]
    return RowsInMemory(rows, keys)


def _object(content: bytes, keys: RowKeys) -> dict[str, Any] | tuple[str, str]:
    if len(content) > keys.row_bytes:
        return "too_large", _too_large(keys.row_bytes)
    try:
        return _read_object(content, keys)
    except ValueError as error:
        return "malformed", str(error)


def read_csv(path: Path, keys: RowKeys) -> RowsInMemory:
    """Reads a .csv file with the column names in its first line.

    Every value is text, except a label in float notation, such as 72.0 or 1e-05, which becomes a number.
    """
    csv.field_size_limit(keys.row_bytes)
    rows: list[tuple[str, Mapping[str, Any] | tuple[str, str]]] = []
    content = read_regular(path, max_bytes=MAX_WHOLE_BYTES)
    with io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            check_columns(path, [name for name in reader.fieldnames or () if name], line=", line 1")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                fields = len(row) - (None in row)
                wrong = ("fields", f"it has another number of fields than the first line, {fields}.")
                if sum(len(value) for value in row.values() if isinstance(value, str)) > keys.row_bytes:
                    rows.append((where, ("too_large", _too_large(keys.row_bytes))))
                    continue
                if (label := row.get(keys.answer)) is not None and FLOAT_TEXT.fullmatch(label):
                    row[keys.answer] = WrittenNumber(label, label)
                rows.append((where, wrong if None in row or None in row.values() else row))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {reader.line_num}: not CSV in UTF-8: {error}") from error
    return RowsInMemory(rows, keys)


def check_columns(path: Path, columns: Sequence[str], *, line: str = "") -> None:
    """Raises ValueError for two columns with the same name."""
    if twice := [name for name, count in Counter(columns).items() if count > 1]:
        raise ValueError(f"data file {path}{line}: two columns have the name {twice[0]!r}. Rename or drop one.")


def open_parquet(path: Path, keys: RowKeys) -> RowFile:
    """Opens a .parquet file. The Parquet library is imported here, because the import is slow."""
    from relax_core.data.parquet_rows import ParquetRows

    return ParquetRows(path, keys)


def open_arrow(path: Path, keys: RowKeys) -> RowFile:
    """Opens an .arrow file, such as those of Hugging Face's datasets."""
    from relax_core.data.arrow_rows import ArrowRows

    return ArrowRows(path, keys)


READERS: dict[str, Callable[[Path, RowKeys], RowFile]] = {
    ".jsonl": JsonlRows,
    ".json": read_json_list,
    ".csv": read_csv,
    ".parquet": open_parquet,
    ".arrow": open_arrow,
    **{inner + suffix: open_compressed for inner in _LINES for suffix in COMPRESSED},
}


def check_row(row: Mapping[str, Any], keys: RowKeys, *, where: str) -> DataRow:
    """Returns the data row with its prompt under "prompt" and its answer, as text, under "answer".

    Media in the prompt's content parts become `MediaSource`s. All further keys are unchanged.

    Raises `BadRow` with a text that starts with ``where``.
    """
    if keys.layout is not None:
        return offline_row(row, keys.layout, where=where)
    for key in (keys.prompt, keys.answer):
        if key not in row:
            if (value := value_at(row, key, missing=_MISSING)) is _MISSING:
                raise BadRow.because("missing_key", missing_key(where, key, row))
            row = {**row, key: value}
    found = messages_of(row[keys.prompt])
    if isinstance(found, ValueError):
        raise BadRow.because("prompt", f"{where}: {keys.prompt}={_short(row[keys.prompt])} {found}")
    prompt, answer = without_null_keys(found), row[keys.answer]
    if not (isinstance(prompt, str) and prompt) and not is_conversation(prompt):
        raise BadRow.because(
            "prompt",
            f"{where}: {keys.prompt}={_short(prompt)} is neither text nor a list of messages with role and content.",
        )
    if not isinstance(prompt, str):
        row = {**row, keys.prompt: (prompt := _with_a_question(prompt, keys, where=where))}
    try:
        shown_answer = label_text(answer, may_be_empty=keys.may_be_empty)
    except ValueError as error:
        value = answer.value if isinstance(answer, WrittenNumber) else answer
        raise BadRow.because("answer", f"{where}: {keys.answer}={_short(value)} {error}") from error
    if isinstance(answer, WrittenNumber):
        row = {**row, keys.answer: answer.value}
    if keys.media.columns or not (isinstance(prompt, str) or all(isinstance(m["content"], str) for m in prompt)):
        row = row_with_sources(row, keys.media, where=where, prompt_key=keys.prompt)
    if holds_huge_integer(answer):
        row = {**row, keys.answer: shown_answer}
    prompt = MessagesOfText(row[keys.prompt]) if isinstance(found, MessagesOfText) else row[keys.prompt]
    made = {**row, "prompt": prompt, "answer": shown_answer}
    if holds_huge_integer(made):
        raise BadRow.because("malformed", f"{where}: a number has more than 64 bits. Write it as text.")
    return made


def _with_a_question(prompt: list[Any], keys: RowKeys, *, where: str) -> list[Any]:
    """Applies data.last_assistant to a conversation that ends with an assistant message.

    Raises `BadRow` if the key is not set, or if all messages are from the assistant.
    """
    if prompt[-1]["role"] != "assistant" or keys.last_assistant is LastAssistant["continue"]:
        return prompt
    if keys.last_assistant is None:
        raise BadRow.because(
            "prompt",
            f"{where}: {keys.prompt} ends with a message of the assistant. data.last_assistant=drop removes this "
            "message, and data.last_assistant=continue lets the model continue it.",
        )
    while prompt and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    if not prompt:
        raise BadRow.because("prompt", f"{where}: {keys.prompt} has only messages of the assistant.")
    return prompt


def offline_modality(rows: RowFile, number: int) -> str:
    """Returns the modality of a data row that is trained without engines; "text" for a malformed row."""
    try:
        return modality_of_row(rows[number])
    except BadRow as bad:
        return modality_of_row(bad)


def without_filled_nulls(row: dict[str, Any], keys: RowKeys) -> dict[str, Any]:
    """Removes nulls from the messages of an Arrow row; Arrow adds them to give all messages the same keys."""
    names = [keys.prompt] if keys.offline is None else list(row)
    return row | {name: without_nulls(row[name]) for name in names if isinstance(row.get(name), list | dict)}


def too_large(where: str, most: int) -> BadRow:
    """Returns the error for a row of more than ``most`` bytes; such a row is not read."""
    return BadRow.because("too_large", f"{where}: {_too_large(most)}")


def _too_large(most: int) -> str:
    return f"the row has more than {most / 1e6:.0f} MB. Remove the row, or name its media as files."


def missing_key(where: str, key: str, present: Mapping[str, Any]) -> str:
    """Returns the error for a row or a file without a key.

    ``present`` has the keys of the row or the columns of the file.
    """
    inner = [
        f"{name}.{inner_key}" for name, value in present.items() if isinstance(value, Mapping) for inner_key in value
    ]
    csv = " The first line of a .csv file has the names." if ".csv" in where else ""
    if csv and len(present) == 1 and any(mark in name for name in present for mark in ";\t|"):
        csv = " Its columns are not separated by commas; no other separator is read."
    return (
        f"{where}: no key {key!r}; its keys are {', '.join(sorted([*present, *inner]))}. "
        f"Set data.prompt_key and data.answer_key to the keys of your data.{csv}"
    )


def _short(value: Any) -> str:
    text = without_base64(shown(value, _SHOWN))
    return text if len(text) <= 60 else text[:57] + "..."
