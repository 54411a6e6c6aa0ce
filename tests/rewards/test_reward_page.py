"""Checks docs/rewards.md: every run passes all checks, every other command is executed, and every reward is named."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.preflight import CHECKS
from relax_core.registry import names
from relax_core.tools.score import main as score

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^ {4}(python \S.*)$", PAGE, re.MULTILINE)
RUNS = [command for command in COMMANDS if command.startswith("python -m relax_core ")]
ROWS = [
    {"prompt": "1+1", "answer": "2", "kind": "math", "scorer": "dapo"},
    {"prompt": "2+2", "answer": "4", "kind": "text", "scorer": "f1"},
    {"prompt": "3+3", "answer": "6", "kind": "math"},
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("math.jsonl", "mixed.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in ROWS * 8))
    answers = [{"response": f"<think>x</think>Answer: {row['answer']}", "answer": row["answer"]} for row in ROWS]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    return tmp_path


@pytest.mark.parametrize("command", RUNS)
def test_a_run_of_the_page_passes_all_checks(command: str, files: Path) -> None:
    small = ["model.task=arithmetic", "data.eval_size=8", "eval.rows=8", "engine.context_length=64"]
    words = shlex.split(command)[3:]
    checks = [] if "reward=remote" in words else CHECKS  # the reward's server must respond before the start
    assert load_config([*words, *small], checks=checks).reward.name in {word.partition("=")[2] for word in words}


def test_the_other_commands_of_the_page_run(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other_commands = [shlex.split(command) for command in COMMANDS if command not in RUNS]
    assert len(other_commands) == 2
    for words in other_commands:
        assert words[:3] == ["python", "-m", "relax_core.tools.score"]
        assert score(words[3:]) == 0
        assert ("'2' against '2'" if "reward=dapo" in words else '"format_think": 1.0') in capsys.readouterr().out


def test_the_page_names_every_reward() -> None:
    assert {name for name in names("reward") if f"`{name}`" not in PAGE} <= {"genrm"}
