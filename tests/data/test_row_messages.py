"""Tests messages in data rows: null keys, tool calls, prompts that end with an answer, ShareGPT's keys, JSON text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from relax_core.config.choices import LastAssistant
from relax_core.contracts.checked_plugins import checked_env
from relax_core.contracts.data import BadRow
from relax_core.data.data_files import RowKeys, open_rows
from relax_core.data.row_formats import MessagesOfText, messages_of
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.registry import find_env
from relax_core.rollout.prompt_tokens import PromptMaker
from tests.data.chat_templates import FAMILIES, write_folder
from tests.data.test_labels import opened

KEYS = RowKeys(prompt="prompt", answer="answer")
USER: dict[str, Any] = {"role": "user", "content": "?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "5"}


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


RESULT = {"role": "tool", "content": "18", "name": "look", "tool_call_id": "call00000"}


def rows(folder: Path, kind: str, *prompts: list[dict[str, Any]], keys: RowKeys = KEYS) -> list[list[dict[str, Any]]]:
    made = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    file = folder / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), file)
    elif kind == "json":
        file.write_text(json.dumps(made))
    else:
        file.write_text("\n".join(map(json.dumps, made)))
    opened = open_rows(file, keys)
    return [opened[number]["prompt"] for number in range(len(made))]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
def test_a_null_key_of_a_message_is_absent(tmp_path: Path, kind: str) -> None:
    nulls = dict.fromkeys(("name", "tool_call_id", "tool_calls", "reasoning_content"))
    parts = [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b", "image": None}]
    found = rows(tmp_path, kind, [{**USER, **nulls}], [{**USER, **nulls, "reasoning_content": "so"}])
    assert found == [[USER], [{**USER, "reasoning_content": "so"}]]
    (of_parts,) = rows(tmp_path, kind, [{"role": "user", "content": parts}])
    assert of_parts == [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}]
    checked = checked_env(find_env("single_turn"))
    assert checked.messages is not None
    assert checked.messages({"prompt": found[0], "answer": "1"}, None) == [USER]


def test_arguments_keep_a_null_that_a_person_wrote_and_lose_those_of_arrow(tmp_path: Path) -> None:
    prompt = [USER, called({"city": "Paris", "unit": None}), RESULT]
    other_messages = [USER, called({"unit": "C"}), RESULT]
    as_lines, _ = rows(tmp_path, "jsonl", prompt, other_messages)
    assert as_lines[1] == {**called({"city": "Paris", "unit": None}), "content": ""}
    for messages, arguments in zip(
        rows(tmp_path, "parquet", prompt, other_messages), ({"city": "Paris"}, {"unit": "C"}), strict=True
    ):
        assert messages == [USER, {**called(arguments), "content": ""}, RESULT]
    text = [USER, called('{"city": "Paris", "unit": null}'), RESULT]
    assert rows(tmp_path, "parquet", text)[0][1]["tool_calls"] == text[1]["tool_calls"]


@pytest.mark.parametrize("family", ["strips_thinking", "opens_thinking", "role_marks"])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_row_renders_arguments_of_text_and_of_objects_alike(tmp_path: Path, kind: str, family: str) -> None:
    tokenizer = PromptTokenizer(write_folder(tmp_path / "model", FAMILIES[family]))
    ids = []
    for arguments in ({"city": "Paris"}, '{"city": "Paris"}'):
        env = checked_env(find_env("single_turn"))
        (prompt,) = rows(tmp_path, kind, [USER, called(arguments), RESULT])
        maker = PromptMaker(env=env, env_config=None, tokenizer=tokenizer, max_prompt_tokens=1000)
        ids.append(maker.tokens({"prompt": prompt, "answer": "1"}, where="row 0"))
    assert ids[0] == ids[1] and "Paris" in tokenizer.decode(ids[0])


def test_an_answer_without_content_and_calls_is_a_bad_row_of_its_file(tmp_path: Path) -> None:
    with pytest.raises(BadRow, match=r"rows.jsonl, line 1: prompt=.* is neither text nor a list of messages"):
        rows(tmp_path, "jsonl", [USER, {"role": "assistant", "content": None}, USER])


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_prompt_that_ends_with_an_answer_is_refused_cut_or_continued(tmp_path: Path, kind: str) -> None:
    prompt = [USER, ANSWER]
    with pytest.raises(BadRow, match=r"(line 1|row 0): prompt ends .*data.last_assistant=drop .*continue") as error:
        rows(tmp_path, kind, prompt)
    assert error.value.reason == "bad_row:prompt"
    drop, goes_on = (dataclasses.replace(KEYS, last_assistant=LastAssistant[name]) for name in ("drop", "continue"))
    assert rows(tmp_path, kind, prompt, [USER, ANSWER, USER], keys=drop) == [[USER], [USER, ANSWER, USER]]
    assert rows(tmp_path, kind, [USER, ANSWER, ANSWER], keys=drop) == [[USER]]
    assert rows(tmp_path, kind, prompt, keys=goes_on) == [prompt]
    with pytest.raises(BadRow, match="only messages of the assistant"):
        rows(tmp_path, kind, [ANSWER], keys=drop)


@pytest.mark.parametrize("name", [None, "drop", "continue"])
def test_only_the_key_lets_a_prompt_of_an_env_go_on(tmp_path: Path, name: str | None) -> None:
    tokenizer = PromptTokenizer(write_folder(tmp_path / "model", FAMILIES["strips_thinking"]))
    maker = PromptMaker(
        env=find_env("single_turn"),
        env_config=None,
        tokenizer=tokenizer,
        max_prompt_tokens=1000,
        last_assistant=None if name is None else LastAssistant[name],
    )
    row = {"prompt": [USER, ANSWER], "answer": "5"}
    if name == "continue":
        ids = maker.tokens(row, where="row 0")
        assert tokenizer.decode(ids).endswith("assistant\n5") and maker.edited(row["prompt"], []).token_ids == ids
    else:
        with pytest.raises(
            BadRow, match=r"row 0: it ends with a message of the assistant; data.last_assistant=continue"
        ):
            maker.tokens(row, where="row 0")


# -- forms of messages -------------------------------------------------------------------------------------------------
ASKED = [{"role": "user", "content": "hi"}]
SHARED = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
READ = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        (json.dumps(ASKED), ASKED),
        (json.dumps([{"content": "hi", "role": "user"}], indent=1), ASKED),
        (json.dumps(SHARED), READ),
        (SHARED, READ),
        (ASKED, ASKED),
        ('[{"value": 3}] is a list. Sort it.', '[{"value": 3}] is a list. Sort it.'),
        ("[[1, 2]]", "[[1, 2]]"),
        ('Say {"role": "user"}', 'Say {"role": "user"}'),
    ],
)
def test_messages_are_read(prompt: Any, wanted: Any) -> None:
    found = messages_of(prompt)
    assert found == wanted
    assert isinstance(found, MessagesOfText) == (isinstance(prompt, str) and prompt != wanted)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (str(ASKED), "not JSON"),
        ('[{"role": "user", "content": "hi"', "not JSON"),
        ('[{"role": "user"}]', "neither text nor a list of messages"),
        ([{"from": "alien", "value": "q"}], "'alien'"),
    ],
)
def test_what_looks_like_messages_and_is_none_makes_a_bad_row(tmp_path: Path, prompt: Any, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "1"}))
    source = opened(tmp_path / "rows.jsonl")
    with pytest.raises(BadRow, match=f"line 1: prompt=.*{message}") as bad:
        source.numbered(0)
    assert bad.value.reason == "bad_row:prompt" and source.modality(0) == "text"
