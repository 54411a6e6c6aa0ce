"""Tests plug-in data sources: same rows and order as a file, held-out rows, identity for a resume, and errors."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.config.schema import DataConfig
from relax_core.contracts.data import BadRow
from relax_core.data.data_identity import data_digest
from relax_core.data.eval_sets import eval_sets
from relax_core.data.sources import file_rows, make_source
from relax_core.preflight import CHECKS, settle

SQLITE = str(Path(__file__).resolve().parents[2] / "examples" / "plugins" / "sqlite_source.py")
ROWS = [(f"rev {10000 + 37 * place}", str(10000 + 37 * place)[::-1]) for place in range(50)]
OWN = """
from relax_core.contracts.data import BadRow, BaseDataSource, DataSourceConfig, DataSourceSpec

class Rows(BaseDataSource):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        if number == 1:
            raise LookupError("the page is gone")
        if number == 2:
            return "text"
        return {"prompt": f"p{number}", "answer": number}

    def held_out(self):
        return HELD_OUT

SPEC = DataSourceSpec(name="own", summary="s", config=DataSourceConfig, open=lambda config: OPENED)
"""


def write_database(path: Path, rows: list[tuple[str, str]]) -> str:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE rows (prompt TEXT, answer TEXT)")
        database.executemany("INSERT INTO rows VALUES (?, ?)", rows)
    return str(path)


def plugin_error_text(database: str) -> list[str]:
    return [f"data.name={SQLITE}", f"data.config.database={database}", "model.task=reverse_digits"]


def sqlite_config(database: str, **changes: Any) -> DataConfig:
    config = load_config([*plugin_error_text(database), "data.eval_size=8", "eval.rows=8"]).data
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def own_source(folder: Path, *, held_out: str = "None", opened: str = "Rows()") -> DataConfig:
    file = folder / "own.py"
    file.write_text(OWN.replace("HELD_OUT", held_out).replace("OPENED", opened))
    return load_config([f"data.name={file}", "data.eval_size=0", "eval.every=0", "model.task=arithmetic"]).data


def test_it_gives_what_a_file_with_the_same_rows_gives(tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in ROWS))
    words = ["data=file", f"data.path={lines}", "data.eval_size=8", "model.task=reverse_digits", "eval.rows=8"]
    of_file = make_source(load_config(words).data, seed=3, eval_rows=8)
    config = sqlite_config(write_database(tmp_path / "rows.db", ROWS))
    source = make_source(config, seed=3, eval_rows=8)
    assert len(source) == len(of_file) == 42
    assert [dict(source.row(place)) for place in range(100)] == [dict(of_file.row(place)) for place in range(100)]
    assert [row["prompt"] for row in source.held_out().rows] == [prompt for prompt, _ in ROWS[-8:]]
    assert source.where(41) == f"{SQLITE}, table rows, rowid 42"
    assert file_rows(config)[1] == 42


def test_its_identity_is_its_content(tmp_path: Path) -> None:
    before = data_digest(sqlite_config(write_database(tmp_path / "one.db", ROWS)))
    assert before == data_digest(sqlite_config(write_database(tmp_path / "moved.db", ROWS)))
    changed = [*ROWS[:20], ("rev 1", "2"), *ROWS[21:]]
    assert before != data_digest(sqlite_config(write_database(tmp_path / "two.db", changed)))
    assert before != data_digest(sqlite_config(write_database(tmp_path / "three.db", ROWS[:-1])))
    with_file = sqlite_config(write_database(tmp_path / "four.db", ROWS), eval_path=SQLITE)
    assert before != data_digest(with_file)


def test_what_a_row_raises_makes_it_a_bad_row(tmp_path: Path) -> None:
    source = make_source(own_source(tmp_path), seed=0, eval_rows=0)
    assert source.numbered(0) == {"prompt": "p0", "answer": "0"}
    with pytest.raises(BadRow, match=r"own.py, row 1: LookupError: the page is gone \(.*own.py, line 10\)") as caught:
        source.numbered(1)
    assert caught.value.reason == "bad_row:source"
    with pytest.raises(
        BadRow, match=r"row 2: WrongResult: data source own \(.*__getitem__ returned 'text' of type str"
    ):
        source.numbered(2)


def test_its_own_held_out_rows_are_evaluated_and_all_others_trained_on(tmp_path: Path) -> None:
    held_out = "[{'prompt': 'e0', 'answer': 1}, {'prompt': '', 'answer': 2}, {'prompt': 'e2', 'answer': 3}]"
    data = own_source(tmp_path, held_out=held_out)
    source = make_source(data, seed=0, eval_rows=3)
    assert len(source) == 4
    (eval_set,) = eval_sets(_with_data(data, max_bad_rows=0.5), source)
    assert [row["prompt"] for row in eval_set.rows] == ["e0", "e2"] and "held-out row 1" in str(eval_set.bad[0])
    with pytest.raises(ValueError, match=r"eval.rows=4, but data.name=.*own.py holds out 3 rows"):
        make_source(data, seed=0, eval_rows=4)


def _with_data(data: DataConfig, *, max_bad_rows: float) -> Any:
    config = load_config(["eval.every=0"])
    config.data = data
    config.data.max_bad_rows = max_bad_rows
    return config


@pytest.mark.parametrize(
    ("opened", "message"),
    [
        ("[]", "returned .* of type list. Wanted: an object of a class under BaseDataSource"),
        ("[][0]", r"data.name=.*own.py: it does not open: IndexError"),
        (
            "type('Empty', (Rows,), {'__len__': lambda self: 0})()",
            "returned 0 of type int. Wanted: the number of rows",
        ),
    ],
)
def test_a_source_that_does_not_open_is_told(tmp_path: Path, opened: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_source(own_source(tmp_path, opened=opened), seed=0, eval_rows=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["data.config.databas=x"],
            "data.config.databas is not a setting of .*sqlite_source.py. Nearest: data.config.data",
        ),
        (["data.config.database=/nowhere.db"], "data.config.database=/nowhere.db: no such file"),
        (["data.config.database=rows.db"], "data.config.database=rows.db: no such file. Give its absolute path"),
        ([], "data.config.database has no value: add data.config.database=..."),
    ],
    ids=["unknown key", "no file", "relative path", "missing value"],
)
def test_a_mistake_in_its_configuration_is_told(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config([f"data.name={SQLITE}", "model.task=reverse_digits", *arguments], checks=CHECKS, settle=settle)
    assert len(caught.value.problems) == 1  # reported once, although several checks read the data


def test_files_beside_a_source_are_refused(tmp_path: Path) -> None:
    message = plugin_error_text(write_database(tmp_path / "rows.db", ROWS))
    with pytest.raises(ConfigError, match=r"data.path=/x.jsonl with data.name=.*supplies the rows. Drop data.path"):
        load_config([*message, "data.path=/x.jsonl"])


def test_a_configuration_that_nothing_reads_and_an_unknown_source_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.config=\{'rows': 3\} with data=reverse_digits, which is no plug-in"):
        load_config(["data.config.rows=3"])
    with pytest.raises(ConfigError, match=r"data=/x/mine.py: a file of your own is data.name=/x/mine.py"):
        load_config(["data=/x/mine.py"])


def test_the_name_of_a_run_has_no_path_of_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        [*plugin_error_text(write_database(tmp_path / "rows.db", ROWS)), "data.eval_size=8", "eval.rows=8"]
    )
    assert config.name == "tiny_qwen3-sqlite_source"
    monkeypatch.chdir(Path(SQLITE).parent)
    words = plugin_error_text(str(tmp_path / "rows.db"))[1:]
    assert load_config(["data.name=sqlite_source.py", *words, "data.eval_size=8", "eval.rows=8"]).data.name == SQLITE


def test_rows_for_training_without_engines_are_read_and_digested(tmp_path: Path) -> None:
    talks = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": text}] for text in ("b", "c")]
    digests = set()
    for number, talk in enumerate(talks):
        own = OWN.replace('{"prompt": f"p{number}", "answer": number}', f'{{"messages": {talk}}}')
        file = tmp_path / f"own{number}.py"
        file.write_text(own.replace("HELD_OUT", "None").replace("OPENED", "Rows()"))
        config = load_config([f"data.name={file}", "data.eval_size=0", "eval.every=0", "model.task=arithmetic"]).data
        source = make_source(config, seed=0, eval_rows=0, offline="demonstrations")
        assert source.numbered(0)["messages"] == talk
        for bad in (1, 2):
            with pytest.raises(BadRow, match=rf"own{number}\.py, row {bad}: "):
                source.numbered(bad)
        digests.add(data_digest(config, offline="demonstrations"))
    assert len(digests) == 2
