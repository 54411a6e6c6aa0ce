"""Tests how a model's config.json and its end tokens are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.families.hf_config import end_token_ids, read_hf_config


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "config.json is not JSON"), ("[1]", "config.json is not a JSON object"), (None, "no config.json there")],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_hf_config(tmp_path)


def test_end_tokens_come_from_two_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert end_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 3]}))
    assert end_token_ids(tmp_path) == (3, 7, 9)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert end_token_ids(tmp_path) == (3, 9)
