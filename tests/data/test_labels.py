"""Tests that labels are read unchanged from the file, and that rows without a label are bad rows."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest

from relax_core.config.schema import DataConfig
from relax_core.contracts.data import BadRow, PromptSource
from relax_core.data.row_formats import label_text, value_at
from relax_core.data.sources import make_source

FILE = DataConfig(name="file", prompt_key="prompt", answer_key="answer", size=0, eval_size=0, shuffle=False, task=None)


def opened(path: Path, **changes: Any) -> PromptSource:
    return make_source(replaced(path=str(path), **changes), seed=0, eval_rows=0)


def replaced(**changes: Any) -> DataConfig:
    return dataclasses.replace(FILE, **changes)


def labels(source: PromptSource) -> list[str]:
    """Returns the label of each row, or the reason why the row is bad."""
    found = []
    for number in range(len(source)):
        try:
            found.append(source.numbered(number)["answer"])
        except BadRow as bad:
            found.append(bad.reason)
    return found


WRITTEN = [
    ("72.0", "72"),
    ("45", "45"),
    ("1e-05", "0.00001"),
    ("1e22", "10000000000000000000000"),
    ("1E2", "100"),
    ("-0.0", "0"),
    ("18.90", "18.90"),
    ("3.14159265358979323846", "3.14159265358979323846"),
    ("1e-999999999", "0"),
    ('"72.0"', "72.0"),
    ('" "', "bad_row:answer"),
    ("null", "bad_row:answer"),
    ("true", "bad_row:answer"),
    ("NaN", "bad_row:malformed"),
]


def test_a_number_of_json_keeps_its_digits(tmp_path: Path) -> None:
    objects = [f'{{"prompt": "p", "answer": {text}}}' for text, _ in WRITTEN]
    (tmp_path / "a.jsonl").write_text("\n".join(objects))
    assert labels(opened(tmp_path / "a.jsonl")) == [label for _, label in WRITTEN]
    (tmp_path / "a.json").write_text(f"[{','.join(objects[:-1])}]")
    assert labels(opened(tmp_path / "a.json")) == [label for _, label in WRITTEN[:-1]]
    (tmp_path / "deep.jsonl").write_text('{"prompt": "p", "rm": {"truth": [1e-05]}}\n{"prompt": "p", "rm": {}}\n')
    assert labels(opened(tmp_path / "deep.jsonl", answer_key="rm.truth.-1")) == ["0.00001", "bad_row:missing_key"]


def test_a_label_beside_another_name_leaves_its_column_a_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "gold": 45.0}')
    row = opened(tmp_path / "a.jsonl", answer_key="gold").numbered(0)
    assert (row["answer"], row["gold"], type(row["gold"])) == ("45", 45.0, float)
    (tmp_path / "a.csv").write_text("prompt,gold\np,45.0\n")
    row = opened(tmp_path / "a.csv", answer_key="gold").numbered(0)
    assert (row["answer"], row["gold"]) == ("45", "45.0")


def test_a_number_of_csv_is_one_where_a_program_wrote_it(tmp_path: Path) -> None:
    texts = ["72.0", "1e-05", "007", "1.50", "v2.0", "nan", "-inf", "", "1e+999999999"]
    (tmp_path / "a.csv").write_text("prompt,answer,,\n" + "".join(f"p,{text},,\n" for text in texts))
    bad = "bad_row:answer"
    assert labels(opened(tmp_path / "a.csv")) == ["72", "0.00001", "007", "1.50", "v2.0", bad, bad, bad, bad]


@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32(), pyarrow.float64()])
def test_a_float_of_parquet_has_its_shortest_form(tmp_path: Path, kind: Any) -> None:
    numbers = pyarrow.array(numpy.array([0.1, 72, 1e-5, numpy.nan, numpy.inf], dtype=kind.to_pandas_dtype()))
    table = {"prompt": ["p"] * 5, "answer": numbers, "deep": pyarrow.StructArray.from_arrays([numbers], ["a.b"])}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    wanted = ["0.1", "72", "0.00001", "bad_row:answer", "bad_row:answer"]
    assert labels(opened(tmp_path / "a.parquet")) == wanted
    table["deep"] = pyarrow.StructArray.from_arrays([numbers], ["truth"])
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "b.parquet")
    assert labels(opened(tmp_path / "b.parquet", answer_key="deep.truth")) == wanted


def test_a_decimal_and_an_integer_are_labels() -> None:
    assert [label_text(Decimal("72.00")), label_text(Decimal("1.50")), label_text(10**30)] == [
        "72",
        "1.50",
        str(10**30),
    ]
    for wrong in (Decimal("NaN"), Decimal("1e999999"), float("inf"), 10**5000, None, [1], True, ""):
        with pytest.raises(ValueError, match=r"^(is|has) "):
            label_text(wrong)
    assert label_text("", may_be_empty=True) == ""


def test_a_column_whose_name_has_a_dot_comes_first() -> None:
    row = {"a.b": 1, "a": {"b": 2, "c": [3, {"d": 4}]}}
    assert [value_at(row, key) for key in ("a.b", "a.c.0", "a.c.-1.d", "a.c.7", "a.x", "z.y")] == [1, 3, 4, *[None] * 3]


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("rows.jsonl", '{"prompt": "p", "answer": "1", "answer": "2"}', "answer"),
        ("rows.jsonl", '{"prompt": "p", "answer": "1", "extra" : 1, "extra" :2}', "extra"),
        ("rows.json", '[{"prompt": "p", "prompt": "q", "answer": "1"}]', "prompt"),
    ],
)
def test_a_key_that_is_there_twice_makes_a_bad_row(tmp_path: Path, name: str, text: str, key: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadRow, match=rf"{name}, (line 1|row 0): .*{key!r} is there twice"):
        opened(tmp_path / name).numbered(0)


def test_a_key_that_is_in_a_text_too_is_there_once(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "answer", "answer": "answer", "m": [{"answer": 1}, {"answer": 2}]}'
    )
    assert labels(opened(tmp_path / "rows.jsonl")) == ["answer"]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer,answer\np,1,2\n")
    with pytest.raises(ValueError, match=r"a\.csv, line 1: two columns have the name 'answer'"):
        opened(tmp_path / "a.csv")
    table = pyarrow.Table.from_arrays([pyarrow.array(["p"])] * 3, names=["prompt", "answer", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: two columns have the name 'prompt'"):
        opened(tmp_path / "a.parquet")


def test_a_key_of_a_struct_that_is_missing_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "reward_model": {"ground_truth": "5"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert labels(opened(tmp_path / "a.parquet", answer_key="reward_model.ground_truth")) == ["5"]
    with pytest.raises(ValueError, match=r"no key 'answer'; its keys are .*reward_model\.ground_truth"):
        opened(tmp_path / "a.parquet")
