"""Tests compressed data files: their rows, damaged content, and content that unpacks to more than the limit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pytest

from relax_core.data import compressed_files, data_files
from relax_core.data.data_files import RowKeys, open_rows

KEYS = RowKeys(prompt="prompt", answer="answer")
ROWS = [{"prompt": f"p{number}", "answer": str(number)} for number in range(50)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def packed(content: bytes, suffix: str) -> bytes:
    return gzip.compress(content) if suffix == ".gz" else bytes(pyarrow.Codec("zstd").compress(content))


def answers(path: Path) -> list[str]:
    rows = open_rows(path, KEYS)
    return [rows[number]["answer"] for number in reversed(range(len(rows)))][::-1]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("inner", [".jsonl", ".json"])
def test_rows_of_a_compressed_file_are_read_by_number(tmp_path: Path, inner: str, suffix: str) -> None:
    file = tmp_path / f"rows{inner}{suffix}"
    expected = [row["answer"] for row in ROWS]
    file.write_bytes(packed(b"\xef\xbb\xbf" + LINES, suffix))
    assert answers(file) == expected
    assert open_rows(file, KEYS).where(3) == f"{file}, line 4"
    file.write_bytes(
        packed(LINES[:100], suffix) + packed(LINES[100:], suffix)
    )  # several parts, as parallel tools write
    assert answers(file) == expected
    file.write_bytes(packed(json.dumps(ROWS).encode(), suffix))
    assert answers(file) == expected


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_or_empty_file_is_refused(tmp_path: Path, suffix: str) -> None:
    file, whole = tmp_path / f"rows.jsonl{suffix}", packed(LINES, suffix)
    for content in (whole[:-1], whole[: len(whole) // 2], b"no such format" * 20):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"rows\.jsonl{suffix}: not a complete {suffix} file"):
            open_rows(file, KEYS)
    file.write_bytes(packed(b"", suffix))
    with pytest.raises(ValueError, match="has no rows"):
        open_rows(file, KEYS)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_content_above_the_limit_is_refused(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_files, "ALWAYS_BYTES", 1 << 20)
    file = tmp_path / f"rows.jsonl{suffix}"
    file.write_bytes(packed(b'{"prompt": "' + b"a" * (8 << 20) + b'", "answer": "1"}', suffix))
    with pytest.raises(ValueError, match=r"unpacks to more than \d MB, more than 200 times"):
        open_rows(file, KEYS)


def test_a_list_above_the_limit_of_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "MAX_WHOLE_BYTES", 1000)
    file = tmp_path / "rows.json.gz"
    file.write_bytes(packed(json.dumps(ROWS).encode(), ".gz"))
    with pytest.raises(ValueError, match="a list of more than 0 MB is not read"):
        open_rows(file, KEYS)
    file.write_bytes(packed(LINES, ".gz"))
    assert len(answers(file)) == len(ROWS)
