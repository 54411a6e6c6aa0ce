"""Tests that each data layout in docs/data.md can be read with the overrides next to it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from relax_core.config.compose import load_config
from relax_core.config.modality import modality_of_row
from relax_core.data.sources import make_source

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
LABELS = {
    "gsm8k": "#### 72",
    "DAPO-Math-17k": "5",
    "train.parquet": "72",
    "open-r1": "<answer>green</answer>",
    "sharegpt.json": "Paris.",
    "trl.jsonl": ("Blue.", "Blue.", "Blue.", "It is $\\boxed{72}$."),
}


def layouts() -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Returns the example and the overrides for each layout."""
    text = PAGE.read_text(encoding="utf-8").partition("## Layouts")[2].partition("\n## ")[0]
    found = re.findall(r"^    (\{.*\})\n    (\S.*)$", text, re.MULTILINE)
    return [(json.loads(row), dict(word.split("=", 1) for word in shlex.split(words))) for row, words in found]


def label_of(number: int, path: str) -> str:
    name = next(label for label in LABELS if path.startswith(label))
    found = LABELS[name]
    return found if isinstance(found, str) else found[number - len(layouts())]


@pytest.mark.parametrize("number", range(9))
def test_a_layout_is_read_by_its_words(tmp_path: Path, number: int) -> None:
    assert len(layouts()) == 9
    row, words = layouts()[number]
    path, image = words.pop("data.path"), words.get("data.media_keys.image")
    words.pop("data.eval_path", None)
    model = "model=tiny_qwen3_vl" if image else "model=tiny_qwen3"
    file = tmp_path / f"rows{Path(path).suffix}"
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        file.write_text(f"[{json.dumps(row)}]" if file.suffix == ".json" else json.dumps(row))
    chosen = [f"{key}={value}" for key, value in words.items()]
    start = ["data=file", f"data.path={file}", model, "data.eval_size=0", "eval.every=0"]
    config = load_config([*start, *([] if image else ["model.task=arithmetic"]), *chosen])
    source = make_source(config.data, seed=0, eval_rows=0)
    got = source.numbered(0)
    assert got["answer"].endswith(label_of(number, path))
    assert modality_of_row(got) == ("image" if image else "text")
    prompt = got["prompt"]
    assert isinstance(prompt, str) or (prompt[0]["role"], type(prompt[0]["content"])) in (("user", str), ("user", list))
