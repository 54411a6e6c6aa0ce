from __future__ import annotations

import codecs
import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from relax_core.config.schema import DataConfig
from relax_core.contracts.data import PromptSource
from relax_core.data.sources import make_source

FILE = DataConfig(
    name="file", prompt_key="question", answer_key="answer", size=0, eval_size=4, shuffle=True, path="", task=None
)
GENERATED = DataConfig(
    name="reverse_digits",
    prompt_key="prompt",
    answer_key="answer",
    size=20,
    eval_size=8,
    shuffle=True,
    task="reverse_digits",
)
ROWS = [{"question": f"what is {n}?", "answer": str(n), "level": n % 3} for n in range(20)]


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    return str(path)


def _file_source(path: str, *, eval_rows: int = 4, **changes: Any) -> PromptSource:
    return make_source(dataclasses.replace(FILE, path=path, **changes), seed=1, eval_rows=eval_rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_file_gives_every_row_once_an_epoch_and_holds_the_last_out(tmp_path: Path, suffix: str) -> None:
    source = _file_source(_write(tmp_path / f"rows{suffix}", ROWS))
    epochs = [[source.row(index) for index in range(start, start + 16)] for start in (0, 16)]
    for epoch in epochs:
        assert sorted(int(row["answer"]) for row in epoch) == list(range(16))
        assert all(row["prompt"] == f"what is {row['answer']}?" for row in epoch)
        assert all(int(row["level"]) == int(row["answer"]) % 3 for row in epoch)
    assert epochs[0] != epochs[1]
    assert [row["answer"] for row in source.eval_rows()] == ["16", "17", "18", "19"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_both_formats_give_the_same_rows_in_the_same_order(tmp_path: Path, suffix: str) -> None:
    plain = _file_source(_write(tmp_path / "rows.jsonl", ROWS))
    other = _file_source(_write(tmp_path / f"other{suffix}", ROWS))
    assert [plain.row(index) for index in range(40)] == [other.row(index) for index in range(40)]


def test_an_eval_file_leaves_all_rows_for_training(tmp_path: Path) -> None:
    held_out = _write(tmp_path / "eval.parquet", [{"question": "held out", "answer": "yes"}])
    source = _file_source(_write(tmp_path / "rows.jsonl", ROWS), eval_path=held_out, eval_rows=1)
    assert {source.row(index)["answer"] for index in range(20)} == {row["answer"] for row in ROWS}
    assert [row["prompt"] for row in source.eval_rows()] == ["held out"]


def test_messages_and_numbers_pass(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]
    for suffix in (".jsonl", ".parquet"):
        path = _write(tmp_path / f"chat{suffix}", [{"question": messages, "answer": 2}])
        row = _file_source(path, eval_size=0, eval_rows=0).row(0)
        assert (row["prompt"], row["answer"]) == (messages, "2")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"question": "a", "answer": "b"}\n{"question": "a", \n', r"rows.jsonl, line 2: not a JSON object"),
        ('{"question": "a", "answer": "b"}\n\n[1]\n', r"rows.jsonl, line 3: not a JSON object"),
        ('{"question": "a", "reply": "b"}\n', r"line 1: no key 'answer'; its keys are question, reply"),
        ('{"question": "", "answer": "b"}\n', r"line 1: question='' is neither text"),
        ('{"question": [{"role": "user"}], "answer": "b"}\n', r"line 1: question=.* is neither text"),
        ('{"question": "a", "answer": null}\n', r"line 1: answer=None is neither text nor a number"),
        ("\n", r"rows.jsonl: it has no rows"),
        ('{"question": "a", "answer": "b"}\n', r"data.eval_size=4: .* has 1 rows, none is left"),
    ],
)
def test_what_is_wrong_with_a_jsonl_file_is_named(tmp_path: Path, text: str, wanted: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=wanted):
        _file_source(str(path))


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "\xff\xfe", "answer": "b"}\n')
    with pytest.raises(ValueError, match="line 1: not a JSON object"):
        _file_source(str(path))


def test_what_is_wrong_with_a_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    with pytest.raises(ValueError, match=r"no key 'question'; its keys are q"):
        _file_source(_write(path, [{"q": "a"}]))
    path.write_text("not parquet")
    with pytest.raises(ValueError, match=r"rows.parquet: not a Parquet file"):
        _file_source(str(path))
    rows = [*ROWS[:7], {"question": None, "answer": "x"}]
    source = _file_source(_write(path, rows), eval_size=0, eval_rows=0, shuffle=False)
    with pytest.raises(ValueError, match=r"rows.parquet, row 7: question=None"):
        source.row(7)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_a_byte_order_mark_is_skipped(tmp_path: Path, suffix: str) -> None:
    """Also where the file is written by hand, with Windows' ends of lines."""
    path = Path(_write(tmp_path / f"rows{suffix}", ROWS))
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    source = _file_source(str(path), shuffle=False)
    assert [source.row(index)["answer"] for index in range(16)] == [str(number) for number in range(16)]
    assert len(source.eval_rows()) == 4


def test_values_of_a_csv_file_are_text_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('question,answer\n"two\nlines, and ""quotes""",007\n' + f"{'long ' * 40_000},1.50\n")
    source = _file_source(str(path), shuffle=False, eval_size=0, eval_rows=0)
    assert (source.row(0)["prompt"], source.row(0)["answer"]) == ('two\nlines, and "quotes"', "007")
    assert (len(source.row(1)["prompt"]), source.row(1)["answer"]) == (200_000, "1.50")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        (
            "rows.csv",
            "question,answer\n1 + 1?,2,3\n",
            r"rows\.csv, line 2: it has not as many fields as the first line, 2",
        ),
        ("rows.csv", "question,answer\n1 + 1?\n", r"rows\.csv, line 2: it has not as many fields as the first line, 2"),
        ("rows.csv", "question,answer\n,2\n", r"rows\.csv, line 2: question='' is neither text nor a list of messages"),
        ("rows.csv", "prompt,answer\n1,2\n", r"rows\.csv, line 2: no key 'question'; its keys are answer, prompt"),
        ("rows.csv", 'question,answer\n"1,2\n', r"rows\.csv, line \d: not CSV in UTF-8: unexpected end of data"),
        ("rows.csv", "", r"rows\.csv: it has no rows"),
        ("rows.json", '{"question": "1", "answer": "2"}\n', r"not a JSON list of objects: .* it is a \.jsonl file\."),
        ("rows.json", '[{"question": "1"}]', r"rows\.json, row 0: no key 'answer'"),
        ("rows.json", "[]", r"rows\.json: it has no rows"),
    ],
)
def test_a_malformed_table_is_named_with_its_place(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=told):
        _file_source(str(tmp_path / name), eval_size=0, eval_rows=0)


def test_what_is_wrong_with_the_settings_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"eval.rows=5, but data.eval_size=4 holds out 4"):
        _file_source(path, eval_rows=5)
    with pytest.raises(ValueError, match=r"unknown suffix '.txt'"):
        _file_source(str(tmp_path / "rows.txt"))
    with pytest.raises(ValueError, match=r"gone.jsonl: no such file"):
        _file_source(str(tmp_path / "gone.jsonl"))
    with pytest.raises(ValueError, match=r"set exactly one"):
        _file_source(path, task="reverse_digits")
    with pytest.raises(ValueError, match=r"data.size=0"):
        make_source(dataclasses.replace(GENERATED, size=0), seed=0, eval_rows=0)


def test_a_generated_task_repeats_its_rows_each_epoch() -> None:
    source = make_source(GENERATED, seed=0, eval_rows=8)
    epochs = [[source.row(index)["prompt"] for index in range(start, start + 20)] for start in (0, 20)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    held_out = source.eval_rows()
    assert len(held_out) == 8
    assert not {row["prompt"] for row in held_out} & set(epochs[0])
    other = make_source(GENERATED, seed=1, eval_rows=8)
    assert other.eval_rows() == held_out
    assert [other.row(index)["prompt"] for index in range(20)] != epochs[0]
