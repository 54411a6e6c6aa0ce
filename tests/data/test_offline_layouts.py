"""Tests that the layouts of data rows for training without engines are found, and that unusable rows are bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from relax_core.config.compose import load_config
from relax_core.config.modality import modality_of_row
from relax_core.config.schema import MediaKeys
from relax_core.contracts.algorithm import Offline
from relax_core.contracts.data import BadRow, DataRow
from relax_core.data.layouts import CHOSEN, LABEL, MESSAGES, REJECTED, TEXT, TOOLS
from relax_core.data.sources import make_source
from tests.data.test_labels import replaced

SYSTEM, ASKED, SAID = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "The colour of the sky?"},
    {"role": "assistant", "content": "Blue."},
)
OTHER = {"role": "assistant", "content": "Green."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
TALK = [ASKED, SAID]
SHAREGPT = [{"from": "human", "value": ASKED["content"]}, {"from": "gpt", "value": SAID["content"]}]


def open_rows(tmp_path: Path, rows: list[dict[str, Any]], kind: Offline, suffix: str, **settings: Any) -> Any:
    file = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.OSFile(str(file), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
    return make_source(replaced(path=str(file), eval_size=0, **settings), seed=0, eval_rows=0, offline=kind)


def read(
    tmp_path: Path, row: dict[str, Any], kind: Offline = "demonstrations", *, suffix: str = ".jsonl", **settings: Any
) -> DataRow:
    found: DataRow = open_rows(tmp_path, [row], kind, suffix, **settings).numbered(0)
    return found


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"messages": TALK}, {}),
    ({"messages": json.dumps(TALK)}, {}),
    ({"conversations": SHAREGPT}, {}),
    ({"conversations": TALK}, {}),
    ({"prompt": ASKED["content"], "answer": "Blue."}, {}),
    ({"prompt": ASKED["content"], "completion": "Blue."}, {}),
    ({"prompt": [ASKED], "completion": [SAID]}, {}),
    ({"prompt": [ASKED], "completion": "Blue."}, {}),
    ({"prompt": ASKED["content"], "prompt_id": "7", "messages": TALK}, {}),
    ({"extra": {"q": ASKED["content"], "a": "Blue."}}, {"prompt_key": "extra.q", "answer_key": "extra.a"}),
    ({"extra": {"talk": TALK}}, {"prompt_key": "extra.talk"}),
    ({"text": "no", "messages": TALK}, {"prompt_key": "messages", "answer_key": "messages.-1.content"}),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_layouts_of_demonstrations_give_the_same_conversation(tmp_path: Path, number: int, suffix: str) -> None:
    row, settings = LAYOUTS[number]
    found = read(tmp_path, row, suffix=suffix, **settings)
    assert (found[MESSAGES], found["prompt"], found["answer"]) == (TALK, [ASKED], "Blue.")
    assert TEXT not in found and modality_of_row(found) == "text"


PAIRS: list[dict[str, Any]] = [
    {"prompt": ASKED["content"], "chosen": "Blue.", "rejected": "Green."},
    {"prompt": [ASKED], "chosen": [SAID], "rejected": [OTHER]},
    {"chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]},
    {"prompt": ASKED["content"], "chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]},
    {"chosen": json.dumps([ASKED, SAID]), "rejected": json.dumps([ASKED, OTHER])},
    {
        "conversations": SHAREGPT[:1],
        "chosen": {"from": "gpt", "value": "Blue."},
        "rejected": {"from": "gpt", "value": "Green."},
    },
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_layouts_of_pairs_give_the_same_conversations(tmp_path: Path, number: int, suffix: str) -> None:
    found = read(tmp_path, PAIRS[number], "pairs", suffix=suffix)
    assert (found[CHOSEN], found[REJECTED]) == ([ASKED, SAID], [ASKED, OTHER])
    assert (found["prompt"], found["answer"]) == ([ASKED], "Blue.")


@pytest.mark.parametrize(("label", "expected"), [(True, True), (False, False), (1, True), (0, False), (1.0, True)])
def test_labels_are_booleans(tmp_path: Path, label: Any, expected: bool) -> None:
    for row in ({"prompt": ASKED["content"], "completion": "Blue."}, {"messages": TALK}):
        found = read(tmp_path, row | {"label": label}, "labels")
        assert (found[MESSAGES], found[LABEL]) == (TALK, expected) and type(found[LABEL]) is bool


def test_plain_text_is_kept(tmp_path: Path) -> None:
    assert read(tmp_path, {"text": " Once\n", "url": "x"})[TEXT] == " Once\n"
    assert read(tmp_path, {"extra": {"text": "Once"}, "text": "no"}, prompt_key="extra.text")[TEXT] == "Once"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
def test_columns_without_a_value_are_not_there(tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "Once", "messages": None, "prompt": None},
        {"text": None, "messages": TALK, "prompt": "a"},
    ]
    source = open_rows(tmp_path, rows, "demonstrations", suffix)
    assert (source.numbered(0)[TEXT], source.numbered(1)[MESSAGES]) == ("Once", TALK)
    assert MESSAGES not in source.numbered(0) and TEXT not in source.numbered(1)
    row = {"talk": ["q", "a"]}
    found = read(tmp_path, row, suffix=suffix, prompt_key="talk.0", answer_key="talk.1")
    assert [message["content"] for message in found[MESSAGES]] == ["q", "a"]


def test_a_column_that_the_user_names_precedes_the_usual_columns(tmp_path: Path) -> None:
    row = {"messages": [ASKED, OTHER], "other": TALK, "text": "no"}
    assert read(tmp_path, row, prompt_key="other")[MESSAGES] == TALK
    with pytest.raises(BadRow, match="other='What is it' is not a list of messages"):
        read(tmp_path, row | {"other": "What is it"}, prompt_key="other")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
def test_tools_and_calls_have_no_nulls_that_the_file_format_added(tmp_path: Path, suffix: str) -> None:
    """Parquet and Arrow give all messages the same keys. In JSON, nulls in arguments are arguments."""
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    talk = [SYSTEM, ASKED, call, {"role": "tool", "name": "add", "content": "7"}, SAID]
    arguments = {"a": 1, "b": None} if suffix == ".jsonl" else {"a": 1}
    tools: Any = [{"type": "function", "function": {"name": "add", "strict": None}}]
    found = read(tmp_path, {"messages": talk, "tools": tools}, suffix=suffix)
    assert found[TOOLS] == [{"type": "function", "function": {"name": "add"}}]
    made = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    assert found[MESSAGES] == [SYSTEM, ASKED, {"role": "assistant", "content": "", "tool_calls": [made]}, *talk[3:]]
    assert found["prompt"] == found[MESSAGES][:4]


def test_tools_may_be_json_text(tmp_path: Path) -> None:
    assert read(tmp_path, {"messages": TALK, "tools": json.dumps([TOOL])})[TOOLS] == [TOOL]
    assert read(tmp_path, {"messages": TALK, "tools": "[]"})[TOOLS] is None


IMAGE = {"type": "image", "image": "a.png"}


@pytest.mark.parametrize(
    ("kind", "row", "reason", "message"),
    [
        ("demonstrations", {"messages": [SYSTEM, ASKED]}, "no_answer", "no message of the assistant"),
        ("demonstrations", {"messages": [SAID, ASKED]}, "no_answer", "no message of the assistant follows"),
        ("demonstrations", {"messages": [ASKED, {"role": "assistant", "content": " \n"}]}, "empty", "message 2"),
        ("demonstrations", {"messages": [ASKED, SAID, SAID]}, "prompt", "message 3 .*follows another"),
        ("demonstrations", {"messages": [ASKED, {"role": "assistant", "content": [IMAGE]}]}, "empty", "message 2"),
        ("demonstrations", {"messages": "hello"}, "prompt", "messages='hello' is not a list of messages"),
        ("demonstrations", {"messages": [{"content": "x"}]}, "prompt", "is not a list of messages"),
        ("demonstrations", {"messages": []}, "prompt", "is not a list of messages"),
        ("demonstrations", {"conversations": [{"from": "x", "value": "y"}]}, "prompt", "a message from 'x'"),
        ("demonstrations", {"messages": TALK, "tools": "add"}, "tools", "not a JSON list"),
        ("demonstrations", {"messages": TALK, "tools": [1]}, "tools", "not a list of schemas"),
        ("demonstrations", {"prompt": "a", "completion": " "}, "empty", "completion is empty"),
        ("demonstrations", {"prompt": "a", "completion": None}, "missing_key", "completion, prompt match no layout"),
        ("demonstrations", {"text": " "}, "empty", "text"),
        ("demonstrations", {"text": 3}, "empty", "text=3"),
        ("demonstrations", {"text": "a", "id": 1 << 70}, "malformed", "more than 64 bits"),
        ("demonstrations", {"q": {"a": "1"}}, "missing_key", r"its keys q, q\.a match no layout.*prompt_key=prompt"),
        ("pairs", {"messages": TALK}, "missing_key", "its keys messages match no layout. Wanted are chosen"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "b"}, "identical", "the same"),
        ("pairs", {"chosen": TALK, "rejected": TALK}, "identical", "the same"),
        ("pairs", {"prompt": "a", "chosen": "", "rejected": "b"}, "empty", "chosen is empty"),
        ("pairs", {"chosen": TALK, "rejected": [ASKED]}, "empty", "rejected has no message after"),
        ("pairs", {"chosen": "Human: a", "rejected": "Human: b"}, "prompt", "chosen='Human: a' is not a list"),
        ("pairs", {"chosen": TALK, "rejected": [SYSTEM, *TALK]}, "prompt", "differ before an answer.*message 1"),
        ("labels", {"messages": TALK, "label": "yes"}, "label", "label='yes' is neither true, false, 0 nor 1"),
        ("labels", {"messages": TALK, "label": 2}, "label", "label=2 is neither"),
        ("labels", {"messages": TALK, "label": 0.5}, "label", r"label=0\.5 is neither"),
        ("labels", {"messages": TALK}, "missing_key", "its keys messages match no layout. Wanted are label"),
    ],
)
def test_an_unusable_row_is_a_bad_row(
    tmp_path: Path, kind: Offline, row: dict[str, Any], reason: str, message: str
) -> None:
    with pytest.raises(BadRow, match=rf"rows\.jsonl, line 1: .*{message}") as refused:
        read(tmp_path, row, kind)
    assert refused.value.reason == f"bad_row:{reason}"


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_without_a_layout_is_refused_with_its_columns(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ValueError, match=r"data\.path: data file .*its keys q, q\.a match no layout") as refused:
        read(tmp_path, {"q": {"a": "1"}}, suffix=suffix)
    assert not isinstance(refused.value, BadRow)


def test_media_become_sources_in_all_conversations(tmp_path: Path) -> None:
    asked = {"role": "user", "content": [IMAGE, {"type": "text", "text": "What?"}]}
    whole = read(tmp_path, {"messages": [asked, SAID]}, "demonstrations")
    assert (
        whole[MESSAGES][0]["content"][0]["image"].path == str(tmp_path / "a.png") and modality_of_row(whole) == "image"
    )
    row = {"prompt": "<image>What?", "chosen": "Blue.", "rejected": "Green.", "pictures": ["a.png"]}
    pair = read(tmp_path, row, "pairs", media_keys=MediaKeys(image="pictures"))
    assert [pair[name][0]["content"][0]["image"].path for name in (CHOSEN, REJECTED)] == [str(tmp_path / "a.png")] * 2
    late = [asked, SAID, asked, SAID]
    with pytest.raises(BadRow, match="rejected has media after the common messages"):
        read(tmp_path, {"chosen": [asked, OTHER], "rejected": late}, "pairs")


def test_a_generated_task_has_no_pairs() -> None:
    config = load_config([])
    with pytest.raises(ValueError, match=r"data\.task=\w+: .*no pairs.*data=file"):
        make_source(config.data, seed=0, eval_rows=0, offline="pairs")
