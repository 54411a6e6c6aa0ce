"""Messages as files have them: with ShareGPT's keys, and as JSON text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.data import BadRow
from relax_core.data.row_forms import MessagesOfText, messages_of
from tests.data.test_labels import opened

USER = [{"role": "user", "content": "hi"}]
SHARED = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
READ = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        (json.dumps(USER), USER),
        (json.dumps([{"content": "hi", "role": "user"}], indent=1), USER),
        (json.dumps(SHARED), READ),
        (SHARED, READ),
        (USER, USER),
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
    ("prompt", "told"),
    [
        (str(USER), "no JSON"),
        ('[{"role": "user", "content": "hi"', "no JSON"),
        ('[{"role": "user"}]', "neither text nor a list of messages"),
        ([{"from": "alien", "value": "q"}], "'alien'"),
    ],
)
def test_what_looks_like_messages_and_is_none_makes_a_bad_row(tmp_path: Path, prompt: Any, told: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "1"}))
    source = opened(tmp_path / "rows.jsonl")
    with pytest.raises(BadRow, match=f"line 1: prompt=.*{told}") as bad:
        source.numbered(0)
    assert bad.value.reason == "bad_row:prompt" and source.modality(0) == "text"
