"""Tests the data check before a start."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.config.schema import RelaxConfig
from relax_core.plan import data_check as look
from relax_core.plan.build_plan import as_text, make_plan
from relax_core.plan.data_check import summarize_data
from relax_core.preflight import CHECKS

ON_FILE = ("data=file", "model.task=reverse_digits", "reward=reverse_digits", "eval.every=0", "data.eval_size=0")


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return f"data.path={path}"


def rows(count: int) -> list[Any]:
    return [{"prompt": f"rev {10000 + place}", "answer": "1"} for place in range(count)]


def looked(*overrides: str) -> look.DataSummary:
    return summarize_data(load_config([*ON_FILE, "engine.context_length=512", *overrides]))


def test_all_rows_are_looked_at_and_what_is_wrong_is_named(tmp_path: Path) -> None:
    many = rows(200)
    many[3] = "{oops"
    many[150] = {"prompt": "rev " + "1 2 3 4 " * 400, "answer": "1"}
    for place in (20, 30, 40, 50, 60):
        many[place] = {"prompt": "rev 1", "answer": None}
    found = looked(write(tmp_path / "rows.jsonl", many))
    assert (found.rows, found.looked, found.refused) == (200, 200, None)
    assert found.bad == Counter({"bad_row:answer": 5, "bad_row:malformed": 1, "too_long": 1})
    assert [text.split(":")[0] for text in found.named] == ["row 3", "row 20", "row 30", "row 40", "row 50"]
    assert (found.longest, found.bound) == (3212, 3212)
    words = [*ON_FILE, f"data.path={tmp_path / 'rows.jsonl'}", "engine.context_length=512"]
    text = as_text(make_plan(load_config(words, checks=CHECKS)))
    assert "Data      200 rows of file are trained on, all checked; no prompt has more than 3212 tokens." in text
    assert "7 rows cannot be used and are left out (5 bad_row:answer, 1 bad_row:malformed, 1 too_long)." in text
    assert f"row 3: {tmp_path / 'rows.jsonl'}, line 4: not a JSON object" in text


def test_too_many_bad_rows_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*rows(18), "{oops", "{oops"])
    with pytest.raises(ConfigError) as refused:
        load_config([*ON_FILE, path], checks=CHECKS)
    (problem,) = refused.value.problems
    assert problem.startswith("2 of the 20 checked rows cannot be used, more than data.max_bad_rows=0.05.")
    assert "line 19: not a JSON object" in problem
    load_config([*ON_FILE, path, "data.max_bad_rows=0.1"], checks=CHECKS)


def test_what_is_cut_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "rev " + "1 2 3 4 " * 400, "answer": "1"}, *rows(20)])
    found = looked(path, "data.overlong=truncate_left")
    assert (found.bad, found.cut, found.longest) == ({}, 1, 3212)
    assert found.left_out() == ["1 prompts are too long for the context, and are shortened."]


def test_a_file_that_changes_is_looked_at_again(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", rows(20))
    assert looked(path).bad == {}
    write(tmp_path / "rows.jsonl", [*rows(19), {"prompt": "rev 10019", "answer": [1]}])  # the same number of bytes
    assert looked(path, "data.max_bad_rows=0.5").bad == {"bad_row:answer": 1}
    write(tmp_path / "rows.jsonl", rows(20))
    assert looked(path).bad == {}


def test_evaluation_sets_are_looked_at_too(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", rows(50))
    held_out = rows(30)
    held_out[7] = {"prompt": "", "answer": "1"}
    write(tmp_path / "gsm.jsonl", held_out)

    def config(*overrides: str) -> RelaxConfig:
        on = (*ON_FILE, data, "eval.every=5", "eval.rows=30", f"eval.sets.gsm={tmp_path / 'gsm.jsonl'}", *overrides)
        return load_config(on, checks=CHECKS)

    message = summarize_data(config()).describe(what="file")
    assert message[-1] == "Evaluation sets, by prompts: gsm 29."
    assert any(line.startswith("1 of evaluation set gsm cannot be used and are left out.") for line in message)
    with pytest.raises(ConfigError, match=r"eval.sets.gsm: 1 of 30 rows cannot be used"):
        config("data.max_bad_rows=0.01")


def test_a_generated_task_costs_nothing_and_tells_its_length() -> None:
    found = summarize_data(load_config())
    message = "10,000 rows of digits are trained on, generated; no prompt has more than 17 tokens."
    assert found.describe(what="digits") == [message]
    assert found.looked == look.GENERATED_ROWS
    with pytest.raises(ConfigError, match=r"64 of the 64 checked rows .* its prompt has 17 tokens"):
        load_config(["engine.context_length=20"], checks=CHECKS)


def test_labels_json_prompts_and_trained_evaluation_rows_are_reported(tmp_path: Path) -> None:
    many = [{"prompt": f"rev {place}", "answer": f"1 + {place} = 7\n#### 7"} for place in range(8)]
    many[3] = {"prompt": '[{"role": "user", "content": "rev 3"}]', "answer": "7"}
    path = write(tmp_path / "rows.jsonl", many)
    asked = write(tmp_path / "copy.jsonl", [{"answer": "7", "prompt": "rev new"}, many[1], many[3]])
    words = [*ON_FILE, path, "reward=exact_match", "eval.every=1", "eval.rows=3", asked.replace("path", "eval_path")]
    labels, first, prompts, trained = summarize_data(load_config(words)).left_out()
    assert "reward exact_match" in labels and labels.split("form: ")[1].startswith("8.")
    assert f"{tmp_path / 'rows.jsonl'}, line 1: answer=" in first and "'7' gets 0" in first
    assert prompts.startswith("1 prompts are JSON text")
    assert trained.startswith("2 of 3 held-out rows are trained on") and "row 1 of the set" in trained
    alone = write(tmp_path / "plain.jsonl", rows(8))
    held_out = [*ON_FILE, alone, "reward=exact_match", "eval.every=1", f"eval.sets.own={tmp_path / 'rows.jsonl'}"]
    assert "evaluation set own, row 0: answer=" in summarize_data(load_config(held_out)).left_out()[1]
    sets = [*ON_FILE, path, "reward=exact_match", "eval.every=1", f"eval.sets.own={tmp_path / 'rows.jsonl'}"]
    assert (
        summarize_data(load_config(sets)).left_out()[-1].startswith("8 of 8 rows of evaluation set own are trained on")
    )


def test_rows_that_all_ask_the_same_are_not_taken_for_evaluated_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "Play.", "answer": "-", "level": place} for place in range(9)])
    words = [*ON_FILE, path, "reward=exact_match", "eval.every=1", "data.eval_size=3", "eval.rows=3"]
    assert summarize_data(load_config(words)).left_out() == []
