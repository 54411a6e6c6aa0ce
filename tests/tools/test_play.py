"""Tests playing an environment in the terminal with typed responses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core.tools.check_env import settings_of
from relax_core.tools.play import main

ISOLATED = """
import random
from dataclasses import dataclass
from relax_core.contracts.env import *

@dataclass(frozen=True)
class MineConfig(IsolatedConfig):
    name: str = "mine"

class Mine(BaseInteractionEnv):
    def __init__(self, start, config): pass
    def reset(self): return str(random.random())
    def step(self, action): return StepResult(done=True)

SPEC = EnvSpec(name="mine", summary="s", config=MineConfig, open=Mine, isolated=True)
"""


def test_a_key_may_be_a_path_as_in_a_run() -> None:
    words = ["env.servers={a: {cwd: x}}", "servers.a.command=python a.py", "env.servers.b.url=u", "max_turns=3"]
    servers = {"a": {"cwd": "x", "command": "python a.py"}, "b": {"url": "u"}}
    assert settings_of(words) == {"servers": servers, "max_turns": 3}
    with pytest.raises(ValueError, match=r"env\.max_turns is 3"):
        settings_of(["max_turns=3", "max_turns.a=1"])


def typed(*texts: str) -> Callable[[str], str]:
    rest = list(texts)

    def ask(shown: str) -> str:
        if not rest:
            raise EOFError
        return rest.pop(0)

    return ask


def test_a_number_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    """With three numbers, two guesses always suffice: the answer to guess 2 gives the direction."""
    game = ["env=number_guess", "env.highest=3", "--seed=2"]
    assert main(game, ask=typed("1", "2", "3")) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("user: guess a number from 1 to 3\n") and "higher" in printed
    assert printed.endswith("[the end; reward 1]\n")
    assert main(game, ask=typed()) == 0
    assert "the end" not in capsys.readouterr().out


def test_a_tool_is_shown_and_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env=calculator"], ask=typed()) == 0
    printed = capsys.readouterr().out
    assert "tool multiply: Returns the product" in printed
    (form,) = re.findall(r"<tool_call>.*</tool_call>", printed)
    a, b = map(int, re.findall(r"\d+", printed)[:2])
    call = form.replace('"a": …', f'"a": {a}').replace('"b": …', f'"b": {b}')
    assert main(["env=calculator"], ask=typed(call, str(a * b))) == 0
    printed = capsys.readouterr().out
    assert f"tool: {a * b}\n" in printed and printed.endswith("[the end; reward 1]\n")


def test_isolated_and_single_turn_envs_and_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ISOLATED)
    assert main([f"env.name={file}"], ask=typed("x")) == 0
    assert capsys.readouterr().out.endswith("[the end; a reward plug-in scores it]\n")
    assert main(["env=single_turn", '--row={"prompt": "2 + 3"}']) == 0
    assert capsys.readouterr().out.startswith("user: 2 + 3\n")
    for words, told in (
        (["env=nowhere"], "not known"),
        (["env.highest=3"], "env has no value"),
        (["env=number_guess", "env.lowest=3"], "env.lowest"),
        (["env=agent"], "agents play it"),
    ):
        assert main(words) == 1
        assert told in capsys.readouterr().err
