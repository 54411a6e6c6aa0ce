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
from relax_core.contracts.data import BadRow, PromptSource
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


def _file_source(path: str | None, *, eval_rows: int = 4, **changes: Any) -> PromptSource:
    return make_source(dataclasses.replace(FILE, path=path, **changes), seed=1, eval_rows=eval_rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_file_gives_every_row_once_an_epoch_and_holds_the_last_out(tmp_path: Path, suffix: str) -> None:
    source = _file_source(_write(tmp_path / f"rows{suffix}", ROWS))
    epochs = [[source.row(index) for index in range(start, start + 16)] for start in (0, 16)]
    lines = _file_source(_write(tmp_path / "lines.jsonl", ROWS))
    order = [lines.row(index)["answer"] for index in range(32)]
    assert [row["answer"] for epoch in epochs for row in epoch] == order, "the order differs from that of a .jsonl"
    for epoch in epochs:
        assert sorted(int(row["answer"]) for row in epoch) == list(range(16))
        assert all(row["prompt"] == f"what is {row['answer']}?" for row in epoch)
        assert all(int(row["level"]) == int(row["answer"]) % 3 for row in epoch)
    assert epochs[0] != epochs[1]
    assert [row["answer"] for row in source.held_out().rows] == ["16", "17", "18", "19"]


def test_an_eval_file_leaves_all_rows_for_training(tmp_path: Path) -> None:
    held_out = _write(tmp_path / "eval.parquet", [{"question": "held out", "answer": "yes"}])
    source = _file_source(_write(tmp_path / "rows.jsonl", ROWS), eval_path=held_out, eval_rows=1)
    assert {source.row(index)["answer"] for index in range(20)} == {row["answer"] for row in ROWS}
    assert [row["prompt"] for row in source.held_out().rows] == ["held out"]


def test_messages_and_numbers_pass(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]
    for suffix in (".jsonl", ".parquet"):
        path = _write(tmp_path / f"chat{suffix}", [{"question": messages, "answer": 2}])
        row = _file_source(path, eval_size=0, eval_rows=0).row(0)
        assert (row["prompt"], row["answer"]) == (messages, "2")


GOOD = b'{"question": "a", "answer": "b"}\n'


@pytest.mark.parametrize(
    ("line", "reason", "wanted"),
    [
        (b'{"question": "a", ', "bad_row:malformed", "not a JSON object"),
        (b"[1]", "bad_row:malformed", "not a JSON object"),
        (b'{"question": "\xff\xfe", "answer": "b"}', "bad_row:malformed", "not a JSON object"),
        (b'{"question": "a", "reply": "b"}', "bad_row:missing_key", "no key 'answer'; its keys are question, reply"),
        (b'{"question": "", "answer": "b"}', "bad_row:prompt", "question='' is neither text"),
        (b'{"question": [{"role": "user"}], "answer": "b"}', "bad_row:prompt", "question=.* is neither text"),
        (b'{"question": "a", "answer": null}', "bad_row:answer", "answer=None is neither text nor a number"),
        (
            b'{"question": "a", "answer": [{"role": "assistant", "content": "b"}]}',
            "bad_row:answer",
            r".* \.-1\.content",
        ),
        (
            b'{"question": "a", "answer": {"ground_truth": "b"}}',
            "bad_row:answer",
            r".* \.ground_truth to data.answer_key",
        ),
    ],
)
def test_a_bad_line_is_named_and_the_others_can_be_used(tmp_path: Path, line: bytes, reason: str, wanted: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    source = _file_source(str(path), eval_size=0, eval_rows=0, shuffle=False)
    assert len(source) == 3
    assert [source.row(index)["answer"] for index in (0, 2)] == ["b", "b"]
    with pytest.raises(BadRow, match=f"{path}, line 3: {wanted}") as bad:
        source.row(1)
    assert bad.value.reason == reason
    held_out = _file_source(str(path), eval_size=2, eval_rows=2).held_out()
    assert ([row["answer"] for row in held_out.rows], [bad_row.reason for bad_row in held_out.bad]) == (["b"], [reason])


def test_a_file_without_rows_or_with_too_few_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n")
    with pytest.raises(ValueError, match=r"rows.jsonl: it has no rows"):
        _file_source(str(path))
    path.write_bytes(GOOD)
    with pytest.raises(ValueError, match=r"data.eval_size=4: .* has 1 rows, and no row remains"):
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
    with pytest.raises(BadRow, match=r"rows.parquet, row 7: question=None"):
        source.row(7)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_a_byte_order_mark_is_skipped(tmp_path: Path, suffix: str) -> None:
    """Users may write the file by hand, with Windows line ends."""
    path = Path(_write(tmp_path / f"rows{suffix}", ROWS))
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    source = _file_source(str(path), shuffle=False)
    assert [source.row(index)["answer"] for index in range(16)] == [str(number) for number in range(16)]
    assert len(source.held_out().rows) == 4


def test_values_of_a_csv_file_are_text_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('question,answer\n"two\nlines, and ""quotes""",007\n' + f"{'long ' * 40_000},1.50\n")
    source = _file_source(str(path), shuffle=False, eval_size=0, eval_rows=0)
    assert (source.row(0)["prompt"], source.row(0)["answer"]) == ('two\nlines, and "quotes"', "007")
    assert (len(source.row(1)["prompt"]), source.row(1)["answer"]) == (200_000, "1.50")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.csv", 'question,answer\n"1,2\n', r"rows\.csv, line \d: not CSV in UTF-8: unexpected end of data"),
        ("rows.csv", "", r"rows\.csv: it has no rows"),
        ("rows.json", '{"question": "1", "answer": "2"}\n', r"not a JSON list of objects: .* it is a \.jsonl file"),
        ("rows.json", "[]", r"rows\.json: it has no rows"),
    ],
)
def test_a_malformed_table_is_named_with_its_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        _file_source(str(tmp_path / name), eval_size=0, eval_rows=0)


FIELDS = r"rows\.csv, line 2: it has another number of fields than the first line, 2"


@pytest.mark.parametrize(
    ("name", "text", "reason", "message"),
    [
        ("rows.csv", "question,answer\n1 + 1?,2,3\n1,2\n", "bad_row:fields", FIELDS),
        ("rows.csv", "question,answer\n1 + 1?\n1,2\n", "bad_row:fields", FIELDS),
        ("rows.csv", "question,answer\n,2\n1,2\n", "bad_row:prompt", r"rows\.csv, line 2: question='' is neither text"),
        ("rows.csv", "prompt,answer\n1,2\n1,2\n", "bad_row:missing_key", r"rows\.csv, line 2: no key 'question'"),
        ("rows.json", '[{"question": "1"}, {}]', "bad_row:missing_key", r"rows\.json, row 0: no key 'answer'"),
        ("rows.json", '[7, {"question": "1"}]', "bad_row:malformed", r"rows\.json, row 0: not a JSON object"),
    ],
)
def test_a_bad_row_of_a_table_is_named(tmp_path: Path, name: str, text: str, reason: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    source = _file_source(str(tmp_path / name), eval_size=0, eval_rows=0, shuffle=False)
    assert len(source) == 2
    with pytest.raises(BadRow, match=message) as bad:
        source.row(0)
    assert bad.value.reason == reason


def _numbered(path: Path, name: str, count: int) -> str:
    return _write(path / name, [{"question": f"{name} {n}", "answer": str(n)} for n in range(count)])


def test_several_files_are_one_and_are_held_out_in_proportion(tmp_path: Path) -> None:
    long, short = _numbered(tmp_path, "long.jsonl", 30), _numbered(tmp_path, "short.parquet", 10)
    source = _file_source(path=None, paths=[long, short], eval_size=8, eval_rows=4)
    epoch = [source.row(index)["prompt"] for index in range(32)]
    assert len(set(epoch)) == len(source) == 32
    assert {prompt.split()[0] for prompt in epoch[:8]} == {"long.jsonl", "short.parquet"}
    assert [row["prompt"] for row in source.held_out().rows] == [
        *(f"long.jsonl {n}" for n in (24, 25, 26)),
        "short.parquet 8",
    ]
    assert not {row["prompt"] for row in source.held_out().rows} & set(epoch)
    assert source.where(24) == f"{short}, row 0"


def test_weights_are_kept_to_in_every_block_and_each_file_has_epochs_of_its_own(tmp_path: Path) -> None:
    many, few = _numbered(tmp_path, "many.jsonl", 40), _numbered(tmp_path, "few.jsonl", 5)
    source = _file_source(path=None, paths={many: 0.6, few: 0.4}, eval_size=0, eval_rows=0)
    drawn = [source.row(index)["prompt"].split() for index in range(200)]
    names = [name for name, _ in drawn]
    for start in range(0, 200, 5):
        assert names[start : start + 5].count("few.jsonl") == 2
    assert len({tuple(names[start : start + 5]) for start in range(0, 200, 5)}) > 5  # not one repeated pattern
    of_few = [int(number) for name, number in drawn if name == "few.jsonl"]
    for start in range(0, 80, 10):  # five blocks
        assert sorted(of_few[start : start + 10]) == sorted([*range(5), *range(5)])
    assert len({tuple(of_few[start : start + 10]) for start in range(0, 80, 10)}) == 8
    of_many = [int(number) for name, number in drawn if name == "many.jsonl"]
    assert sorted(of_many[:120]) == sorted(3 * list(range(40)))


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        ([], r"data.paths=\[\]: it names no file"),
        ("rows.jsonl", r"data.paths=rows.jsonl: it names no file. Give a list"),
        (["{0}/none-*.jsonl"], r"data.paths: no file matches .*/none-\*.jsonl"),
        ({"{0}/a.jsonl": 0, "{0}/b.jsonl": 1}, r"a.jsonl has weight 0. Give a number above 0"),
        ({"{0}/a.jsonl": "much"}, r"a.jsonl has weight 'much'"),
        ({"{0}/a.jsonl": 1, "{0}/b.jsonl": 1e-6}, r"weight 1e-06 is less than a thousandth"),
    ],
)
def test_paths_that_name_nothing_usable(tmp_path: Path, paths: Any, wanted: str) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        _numbered(tmp_path, name, 3)
    if isinstance(paths, list):
        paths = [path.format(tmp_path) for path in paths]
    elif isinstance(paths, dict):
        paths = {path.format(tmp_path): weight for path, weight in paths.items()}
    with pytest.raises(ValueError, match=wanted):
        _file_source(path=None, paths=paths, eval_size=0, eval_rows=0)


def test_what_is_wrong_with_the_settings_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"eval.rows=5, but data.eval_size=4 holds out 4"):
        _file_source(path, eval_rows=5)
    with pytest.raises(ValueError, match=r"set exactly one"):
        _file_source(path, task="reverse_digits")
    with pytest.raises(ValueError, match=r"data.size=0"):
        make_source(dataclasses.replace(GENERATED, size=0), seed=0, eval_rows=0)


def test_a_generated_task_repeats_its_rows_each_epoch() -> None:
    source = make_source(GENERATED, seed=0, eval_rows=8)
    epochs = [[source.row(index)["prompt"] for index in range(start, start + 20)] for start in (0, 20)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    held_out = source.held_out().rows
    assert len(held_out) == 8
    assert not {row["prompt"] for row in held_out} & set(epochs[0])
    other_source = make_source(GENERATED, seed=1, eval_rows=8)
    assert other_source.held_out().rows == held_out
    assert [other_source.row(index)["prompt"] for index in range(20)] != epochs[0]
