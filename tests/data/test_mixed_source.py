"""Tests the order of rows for given shares of modalities, and the modality of a row in each kind of file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from relax_core.config.compose import load_config
from relax_core.config.modality import modality_of_row
from relax_core.config.schema import DataConfig
from relax_core.contracts.data import BadRow
from relax_core.data.sources import make_source

MODALITIES = ["text", "image", "video", "text", "image_audio", "text", "video", "text"] * 3


def data_rows() -> list[dict[str, Any]]:
    """Returns rows of all modalities: with placeholders, with content parts, or plain."""
    rows: list[dict[str, Any]] = []
    for number, modality in enumerate(MODALITIES):
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": f"say {number}"}], "answer": str(number)}
        if modality == "image":
            row = {**row, "prompt": [{"role": "user", "content": "<image>?"}], "images": ["a.png"]}
        elif modality != "text":
            kinds = modality.split("_")
            parts = [{"type": kind, kind: f"a.{kind}"} for kind in kinds]
            row["prompt"] = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
        rows.append(row)
    return rows


def config_of(path: Path, **changes: Any) -> DataConfig:
    overrides = ["data=file", f"data.path={path}", "data.media_keys.image=images", "model=tiny_qwen3_vl"]
    return replace(load_config(overrides).data, eval_size=0, **changes)


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in data_rows()))
    return path


def test_an_epoch_of_each_modality_has_each_of_its_rows_once(jsonl: Path) -> None:
    mix = {"video": 0.25, "text": 0.75}
    source = make_source(config_of(jsonl, mix=mix), seed=3, eval_rows=0)
    drawn = [source.number(index) for index in range(64)]
    by_modality = {name: [index for index in drawn if MODALITIES[index] == name] for name in mix}
    assert {name: len(numbers) for name, numbers in by_modality.items()} == {"video": 16, "text": 48}
    for name, numbers in by_modality.items():
        rows = MODALITIES.count(name)
        assert set(Counter(numbers[:rows]).values()) == {1} and len(set(numbers)) == rows
    assert all(source.row(index) == source.numbered(drawn[index]) for index in range(8))
    again = make_source(config_of(jsonl, mix=mix), seed=3, eval_rows=0)
    assert [again.number(index) for index in range(64)] == drawn
    other_source = make_source(config_of(jsonl, mix=mix), seed=4, eval_rows=0)
    assert [other_source.number(index) for index in range(64)] != drawn


def test_every_file_gives_a_row_the_modality_of_its_media(jsonl: Path, tmp_path: Path) -> None:
    rows = data_rows()
    listed = tmp_path / "rows.json"
    listed.write_text(json.dumps(rows))
    table = tmp_path / "rows.parquet"
    plain = [{"prompt": "<image>?" if "images" in row else "?", "answer": "x", **row_images(row)} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(plain), table, row_group_size=5)
    for path in (jsonl, listed, table):
        source = make_source(config_of(path), seed=0, eval_rows=0)
        found = [source.modality(number) for number in range(len(source))]
        assert found == [modality_of_row(source.numbered(number)) for number in range(len(source))]
        assert found == (
            MODALITIES if path != table else [modality if modality == "image" else "text" for modality in MODALITIES]
        )


def row_images(row: dict[str, Any]) -> dict[str, Any]:
    return {"images": row.get("images", [])}


def test_rows_that_cannot_be_used_have_a_modality_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "<image>?", "answer": "x"}\nnot json\n{"prompt": 5, "answer": "x"}\n{"answer": "x"}\n')
    source = make_source(config_of(path), seed=0, eval_rows=0)
    assert [source.modality(number) for number in range(4)] == ["image", "text", "text", "text"]
    for number in range(4):
        with pytest.raises(BadRow) as bad:
            source.numbered(number)
        assert modality_of_row(bad.value) == source.modality(number)


def test_a_modality_that_no_row_has_is_refused(jsonl: Path) -> None:
    with pytest.raises(ValueError, match=r"none of the 24 rows .* modality audio; they have .*image_audio, text, vid"):
        make_source(config_of(jsonl, mix={"audio": 0.5, "text": 0.5}), seed=0, eval_rows=0)
    with pytest.raises(ValueError, match=r"data\.mix=\{'text': 0\.5\}: the shares sum to 0\.5\. .* or null"):
        make_source(config_of(jsonl, mix={"text": 0.5}), seed=0, eval_rows=0)


def test_a_generated_task_is_drawn_by_shares() -> None:
    config = load_config(["model=tiny_qwen3_vl", "data=see", "data.mix={image: 0.1, text: 0.9}"]).data
    source = make_source(replace(config, size=60, eval_size=0), seed=0, eval_rows=0)
    drawn = Counter(source.modality(source.number(index)) for index in range(100))
    assert drawn == {"image": 10, "text": 90}
