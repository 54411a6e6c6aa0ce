"""Tests the files that a data path selects: wildcards, folders, links, and names that are not local data files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.data.paths import data_files
from relax_core.data.sources import file_rows, make_source
from tests.data.test_labels import opened, replaced


def write(path: Path, *prompts: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f'{{"prompt": "{prompt}", "answer": "1"}}\n' for prompt in prompts))
    return str(path)


def test_a_wildcard_and_a_folder_are_their_files_by_name(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path / "shards" / f"train-{name}.jsonl", name)
    write(tmp_path / "shards" / "more" / "d.jsonl", "d")
    (tmp_path / "shards" / "dataset_info.json").write_text("{}")
    (tmp_path / "shards" / "README.md").touch()
    for path in ("shards", "shards/", "shards/train-*.jsonl", "shards/train-[abc].jsonl"):
        source = opened(Path(f"{tmp_path}/{path}"))
        assert [source.numbered(number)["prompt"] for number in range(len(source))] == ["a", "b", "c"]
    own = replaced(path=write(tmp_path / "own.jsonl", "x"), eval_path=str(tmp_path / "shards"))
    assert [row["prompt"] for row in make_source(own, seed=0, eval_rows=3).held_out().rows] == ["a", "b", "c"]


@pytest.mark.parametrize("made", ["link", "hard", "folder/../rows.jsonl", "rows.jsonl", "rows.json?"])
@pytest.mark.parametrize("weighted", [False, True])
def test_one_file_under_two_names_is_refused(tmp_path: Path, made: str, weighted: bool) -> None:
    first = write(tmp_path / "rows.jsonl", "a", "b")
    (tmp_path / "folder").mkdir()
    second = tmp_path / f"{made}.jsonl" if made in ("link", "hard") else Path(f"{tmp_path}/{made}")
    if made == "link":
        second.symlink_to(first)
    if made == "hard":
        os.link(first, second)
    names = [first, str(second)]
    paths: Any = dict(zip(names, (1, 2), strict=True)) if weighted and names[0] != names[1] else names
    with pytest.raises(ValueError, match=r"data\.paths: .* is named twice"):
        file_rows(replaced(paths=paths))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["train-0.jsonl", "test-0.jsonl"], r"several splits.*data\.path='.*/train\*\.jsonl'"),
        (["x_val.jsonl", "x.jsonl"], "several splits"),
        (["a.jsonl", "b.csv"], r"several kinds.*/\*\.jsonl'"),
        (["data/a.jsonl"], r"no file of .*below it have some: .*/data"),
        (["README.md"], r"no file of \.jsonl"),
    ],
)
def test_a_folder_whose_files_are_not_clear_is_refused(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        write(tmp_path / name, "a")
    with pytest.raises(ValueError, match=message):
        data_files(str(tmp_path), key="data.path")


def test_a_saved_folder_of_datasets_is_read(tmp_path: Path) -> None:
    for number, texts in enumerate((["a", "b"], ["c"])):
        table = pyarrow.table({"prompt": texts, "answer": texts})
        name = str(tmp_path / f"data-0000{number}-of-00002.arrow")
        with pyarrow.OSFile(name, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    source = opened(tmp_path)
    assert [source.numbered(number)["prompt"] for number in range(len(source))] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows.csv.gz", "gunzip -k"),
        ("rows.csv.zst", "zstd -d"),
        ("rows.zip", "unzip"),
        ("rows.arrow", "not an Arrow file"),
        ("rows.tsv", "unknown suffix '.tsv'"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_the_command_that_helps(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        opened(tmp_path / name)


def test_a_name_of_the_hub_is_refused_with_its_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="hf download openai/gsm8k --repo-type dataset"):
        opened(tmp_path / "openai" / "gsm8k")
    with pytest.raises(ValueError, match=r"no such file\.$"):
        opened(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.path=https://x.org/a/train.jsonl?x=1"], "curl -L -o train.jsonl 'https://x.org/a/train.jsonl"),
        (["data.path=s3://bucket/train.jsonl"], "Copy it"),
        (["data.paths=[hf://datasets/a/b.parquet]"], "hf download"),
        (["data.path=a.jsonl", "data.eval_path=http://x/b.csv"], "data.eval_path=http"),
    ],
)
def test_an_address_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(["data=file", "model.task=reverse_digits", *arguments])
    assert message in str(refused.value)
