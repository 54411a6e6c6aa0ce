"""Tests Arrow files: rows in both formats, and damaged, compressed and dictionary-encoded content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest

from relax_core.contracts.data import BadRow
from relax_core.data.data_files import RowKeys, open_rows

KEYS = RowKeys(prompt="prompt", answer="answer")
TABLE = pyarrow.table({"prompt": [f"p{number}" for number in range(25)], "answer": [str(n) for n in range(25)]})


def write(path: Path, table: pyarrow.Table = TABLE, *, file_format: bool = False, **options: Any) -> Path:
    make = pyarrow.ipc.new_file if file_format else pyarrow.ipc.new_stream
    settings = pyarrow.ipc.IpcWriteOptions(**options)
    with pyarrow.OSFile(str(path), "wb") as file, make(file, table.schema, options=settings) as out:
        out.write_table(table, max_chunksize=10)
    return path


@pytest.mark.parametrize("file_format", [False, True])
def test_rows_are_read_by_number(tmp_path: Path, file_format: bool) -> None:
    rows = open_rows(write(tmp_path / "rows.arrow", file_format=file_format), KEYS)
    assert [rows[number]["answer"] for number in (24, 0, 10, 9)] == ["24", "0", "10", "9"]
    assert len(rows) == 25 and rows.where(11).endswith("rows.arrow, row 11") and rows.modality(3) == "text"


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_values_are_refused(tmp_path: Path, compression: str) -> None:
    table = pyarrow.table({"prompt": ["a" * 10_000] * 25, "answer": ["1"] * 25})
    file = write(tmp_path / "rows.arrow", table, compression=compression)
    with pytest.raises(ValueError, match=r"rows\.arrow: it has compressed .*to_parquet"):
        open_rows(file, KEYS)


def test_dictionary_encoded_values_are_refused(tmp_path: Path) -> None:
    table = TABLE.set_column(0, "prompt", TABLE["prompt"].dictionary_encode())
    with pytest.raises(ValueError, match=r"dictionary-encoded values.*to_parquet"):
        open_rows(write(tmp_path / "rows.arrow", table), KEYS)


def test_a_missing_column_is_refused_with_the_columns_that_exist(tmp_path: Path) -> None:
    table = TABLE.rename_columns(["question", "answer"])
    with pytest.raises(ValueError, match=r"no key 'prompt'; its keys are answer, question"):
        open_rows(write(tmp_path / "rows.arrow", table), KEYS)


def test_a_wrong_offset_makes_bad_rows(tmp_path: Path) -> None:
    """An offset beyond the text would read other memory of the process."""
    file = write(tmp_path / "rows.arrow")
    content = bytearray(file.read_bytes())
    offsets = numpy.arange(0, 22, 2, dtype="<i4").tobytes()  # of "p0" to "p9"
    at = content.index(offsets)
    content[at + 12 : at + 16] = (1 << 30).to_bytes(4, "little")
    file.write_bytes(content)
    rows = open_rows(file, KEYS)
    with pytest.raises(BadRow, match="row 3: its row group cannot be read"):
        rows[3]
    assert rows[10]["prompt"] == "p10"


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """Any byte may be wrong. The file is then refused, or its rows are bad rows, or other values are read."""
    file = write(tmp_path / "rows.arrow")
    whole = file.read_bytes()
    random = numpy.random.default_rng(0)
    refused = 0
    for _ in range(400):
        content = bytearray(whole)
        for at in random.integers(len(content), size=3):
            content[at] = random.integers(256)
        file.write_bytes(content[: random.integers(len(content))] if random.random() < 0.3 else content)
        try:
            rows = open_rows(file, KEYS)
            for number in range(len(rows)):
                try:
                    rows[number]
                except BadRow:
                    refused += 1
        except ValueError:
            refused += 1
    assert refused > 50
