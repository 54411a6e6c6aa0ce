"""Checks docs/judges.md: each command passes the checks before a start, with the files that the command names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.control.model_folders import judge_folders, judge_problems
from relax_core.rollout.judges.judge_choice import judge_engines
from relax_core.tools.make_tiny import tiny_model_folder

PAGE = Path(__file__).resolve().parents[3] / "docs" / "judges.md"
COMMANDS = [line for line in PAGE.read_text().splitlines() if line.startswith("python -m relax_core ")]
ENGINES = [["main"], ["main"] * 2, [], ["maths", "prose"], ["main"]]


@pytest.mark.parametrize(("command", "engines"), list(zip(COMMANDS, ENGINES, strict=True)))
def test_the_commands_of_the_page(
    command: str, engines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_model_folder("tiny_qwen3", task="arithmetic")
    for folder in ("judge_model", "my_model"):
        (tmp_path / folder).symlink_to(model)
    rows = [{"prompt": "2 + 2?", "answer": "4", "judge": judge} for judge in ("maths", "prose")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (example,) = [line.strip() for line in PAGE.read_text().splitlines() if line.startswith("    {")]
    (tmp_path / "known.jsonl").write_text(example)
    config = load_config(shlex.split(command)[3:])
    assert judge_engines(config) == engines
    assert set(judge_folders(config).values()) <= {tmp_path / "judge_model"}
    assert list(judge_problems(config)) == []
