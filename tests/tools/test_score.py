"""Tests `python -m relax_core.tools.score`: it scores a file, and reports missing scores by its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_core.tools.score import main


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"file={path}"


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_table_and_lines(tmp_path: Path, told: Any) -> None:
    rows = [{"response": "Answer: 42", "answer": 42}, {"responses": ["Answer: 7", "Answer: 8"], "label": "7"}]
    file = write(tmp_path / "answers.jsonl", *rows)
    code, out, _ = told("reward=dapo", file)
    assert code == 0
    assert "'8' against '7'" in out and "3 answers, mean reward 0.3333, 66.7% exact" in out
    code, out, _ = told("reward=dapo", file, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["line"], line["number"], line["reward"]) for line in lines] == [
        (1, 0, 1.0),
        (2, 0, 1.0),
        (2, 1, -1.0),
    ]
    assert lines[2]["parts"] == {"right": 0.0} and lines[2]["why"] == "'8' against '7'"
    code, out, _ = told("reward=dapo", "reward.strict=true", file)
    assert code == 0 and "no answer against '42'" in out


def test_a_sum_and_rewards_by_row(tmp_path: Path, told: Any) -> None:
    file = write(tmp_path / "a.jsonl", {"response": "<think>x</think> \\boxed{4}", "answer": "4", "scorer": "math"})
    parts = "reward.parts=[{reward: math, weight: 0.9}, {reward: format_think, weight: 0.1}]"
    code, out, _ = told("reward=mix", parts, file, "--json")
    assert code == 0 and json.loads(out)["parts"] == {"math": 1.0, "format_think": 1.0}
    code, out, _ = told("reward=f1", "reward.by=scorer", file)
    assert code == 0 and "math 1" in out


def test_an_answer_without_a_reward_is_told(tmp_path: Path, told: Any) -> None:
    plugin = tmp_path / "odd.py"
    plugin.write_text(
        "from relax_core.contracts.reward import RewardConfig, RewardOutput, RewardSpec\n"
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\nclass Config(RewardConfig):\n    name: str = 'odd'\n"
        "def score(given, config):\n    return RewardOutput(reward=None, reason='it is [odd]')\n"
        "SPEC = RewardSpec(name='odd', summary='s', config=Config, score=score)\n"
    )
    code, out, _ = told(f"reward={plugin}", write(tmp_path / "a.jsonl", {"response": "r", "answer": "a"}))
    assert code == 1 and "it is [odd]" in out and "1 without a reward" in out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["reward=dapo"], "file: write reward=NAME file=FILE.jsonl"),
        (["FILE"], "reward: name one, such as reward=math"),
        (["FILE", "reward=dappo"], "reward.name=dappo is not known"),
        (["FILE", "reward=dapo", "reward.strikt=true"], "reward.strikt is not a setting of dapo"),
        (["FILE", "reward=dapo", "strict=true"], "strict: only reward=NAME"),
        (["FILE", "reward=dapo"], "a.jsonl, line 1: reward dapo: answer='red' is not a number"),
        (["file=/no/such.jsonl", "reward=dapo"], "No such file"),
    ],
)
def test_wrong_input(tmp_path: Path, told: Any, arguments: list[str], error: str) -> None:
    file = write(tmp_path / "a.jsonl", {"response": "r", "answer": "red"})
    code, _, err = told(*(file if word == "FILE" else word for word in arguments))
    assert code == 2 and error in err


@pytest.mark.parametrize("line", ["{", "[]", '{"answer": "a"}', '{"response": "r"}', '{"response": 7, "answer": "a"}'])
def test_a_line_that_cannot_be_scored(tmp_path: Path, told: Any, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"response": "r", "answer": "a"}\n' + line + "\n")
    code, _, err = told("reward=f1", f"file={tmp_path}/a.jsonl")
    assert code == 2 and "a.jsonl, line 2: " in err
