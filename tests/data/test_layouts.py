"""Each layout of docs/data.md is read by the words beside it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from relax_core.config.media_schema import MediaKeys
from relax_core.config.schema import DataConfig
from tests.data.test_labels import opened

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
KNOWN = {one.name for one in dataclasses.fields(DataConfig)}
LABELS = {
    "gsm8k": "#### 72",
    "DAPO-Math-17k": "5",
    "train.parquet": "72",
    "open-r1": "<answer>green</answer>",
    "sharegpt.json": "Paris.",
    "trl.jsonl": ("Blue.", "Blue.", "Blue.", "It is $\\boxed{72}$."),
}


def layouts() -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Returns the example and the words of each layout."""
    text = PAGE.read_text(encoding="utf-8").partition("## Layouts")[2].partition("\n## ")[0]
    found = re.findall(r"^    (\{.*\})\n    (\S.*)$", text, re.MULTILINE)
    return [(json.loads(row), dict(word.split("=", 1) for word in shlex.split(words))) for row, words in found]


def label_of(number: int, path: str) -> str:
    name = next(one for one in LABELS if path.startswith(one))
    found = LABELS[name]
    return found if isinstance(found, str) else found[number - len(layouts())]


@pytest.mark.parametrize("number", range(9))
def test_a_layout_is_read_by_its_words(tmp_path: Path, number: int) -> None:
    assert len(layouts()) == 9
    row, words = layouts()[number]
    path = words.pop("data.path")
    keys: dict[str, Any] = {key.removeprefix("data."): value for key, value in words.items() if key[:5] == "data."}
    keys.pop("eval_path", None)
    if (image := keys.pop("media_keys.image", None)) is not None:
        keys["media_keys"] = MediaKeys(image=image)
    unknown = keys.keys() - KNOWN
    if unknown == {"media_place"}:
        pytest.skip("data.media_place is not there yet")
    for key in unknown & {"last_assistant"}:
        del keys[key]
    file = tmp_path / f"rows{Path(path).suffix}"
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        file.write_text(f"[{json.dumps(row)}]" if file.suffix == ".json" else json.dumps(row))
    source = opened(file, **keys)
    got = source.numbered(0)
    assert got["answer"].endswith(label_of(number, path))
    assert source.modality(0) == ("image" if image else "text")
    prompt = got["prompt"]
    assert isinstance(prompt, str) or (prompt[0]["role"], type(prompt[0]["content"])) in (("user", str), ("user", list))
