"""Tests `relax list`."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.cli.listing import list_command
from relax_core.registry import ALL_KINDS, names, title_of

REWARD = """
from dataclasses import dataclass

from relax_core.contracts.reward import RewardInput, RewardConfig, RewardOutput, RewardSpec


@dataclass(frozen=True)
class Config(RewardConfig):
    pass


def score(given: RewardInput, config: Config) -> RewardOutput:
    return RewardOutput(reward=1.0)


SPEC = RewardSpec(name="mine", summary="always content", config=Config, score=score)
"""


def test_everything_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_command([]) == 0
    output = capsys.readouterr().out
    lines = output.splitlines()
    sections = {text.split(" (")[0].strip(): text.splitlines() for text in output.split("\n\n")}
    assert any(line.split()[:1] == ["file"] for line in sections["Data sources"])
    for kind in ALL_KINDS:
        for name in names(kind):
            (line,) = (line for line in sections[title_of(kind)] if line.split()[:1] == [name])
            assert len(line.split()) > 2, line
    for name in ("tiny_qwen3", "Qwen3-4B", "math_file", "genrm_pairwise", "genrm_rubric", "hermes", "auto", "number"):
        assert any(line.split()[:1] == [name] for line in lines)


def test_environments_are_listed_with_their_tools(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(Path(__file__).resolve().parents[2] / "examples" / "plugins" / "phone_book.py")
    assert list_command([file]) == 0
    lines = capsys.readouterr().out.splitlines()
    (calculator,) = (line for line in lines if line.split()[:1] == ["calculator"] and "as a tool" in line)
    (game,) = (line for line in lines if line.split()[:1] == ["number_guess"] and "higher or lower" in line)
    (own,) = (line for line in lines if f"env.name={file}" in line)
    assert calculator.endswith("(tools: multiply)") and "tools:" not in game and "(tools: " in own


def test_a_file_is_listed_with_its_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(REWARD)
    assert list_command([str(file)]) == 0
    assert f"reward.name={file} always content" in " ".join(capsys.readouterr().out.split())


def test_a_broken_file_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("\n\nraise RuntimeError('no')\n")
    assert list_command([str(file)]) == 2
    printed = capsys.readouterr()
    assert f"relax: {file}: {file}, line 3: RuntimeError: no" in printed.err
    assert "grpo" in printed.out
