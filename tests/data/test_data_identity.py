"""Tests that Relax identifies data by content: files may move, but must not change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relax_core.config.schema import DataConfig
from relax_core.data import data_identity as identity
from relax_core.data.data_identity import data_digest, file_digest


def config(**values: object) -> DataConfig:
    return DataConfig(
        name="file", prompt_key="prompt", answer_key="answer", size=0, eval_size=0, shuffle=True, **values
    )  # type: ignore[arg-type]


def test_a_file_that_only_moved_is_the_same_data(tmp_path: Path) -> None:
    old_path, new_path = tmp_path / "one.jsonl", tmp_path / "below" / "other.jsonl"
    old_path.write_text("a\nb\n")
    before = data_digest(config(path=str(old_path)))
    new_path.parent.mkdir()
    old_path.rename(new_path)
    assert data_digest(config(path=str(new_path))) == before
    assert data_digest(config(paths=[str(new_path)])) == before
    new_path.write_text("a\nc\n")
    assert data_digest(config(path=str(new_path))) != before


def test_order_weights_and_held_out_rows_are_part_of_it(tmp_path: Path) -> None:
    first_path, second_path = str(tmp_path / "one.jsonl"), str(tmp_path / "other.jsonl")
    Path(first_path).write_text("a\n")
    Path(second_path).write_text("b\n")
    digests = [
        data_digest(config(paths=[first_path, second_path])),
        data_digest(config(paths=[second_path, first_path])),
        data_digest(config(paths={first_path: 1, second_path: 1})),
        data_digest(config(paths={first_path: 2, second_path: 1})),
        data_digest(config(path=first_path)),
        data_digest(config(path=first_path, eval_path=second_path)),
    ]
    assert len(set(digests)) == len(digests)
    assert data_digest(config(task="reverse_digits")) == ""


def test_of_a_large_file_blocks_all_over_it_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "WHOLE_BYTES", 64)
    monkeypatch.setattr(identity, "BLOCK_BYTES", 8)
    file = tmp_path / "large.jsonl"
    data = bytearray(os.urandom(1000))
    file.write_bytes(data)
    before = file_digest(file)
    for place in (0, 500, 999):
        changed = bytearray(data)
        if place == 500:  # the start of the middle block
            place = 4 * (1000 - 8) // 7
        changed[place] ^= 1
        file.write_bytes(changed)
        assert file_digest(file) != before, place
    file.write_bytes(data + b"x")
    assert file_digest(file) != before
    file.write_bytes(data)
    assert file_digest(file) == before
