"""Tests the check for environment authors: it accepts the built-in environments, and finds faults in other envs."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.sandbox.run_code import SandboxRefused, try_sandbox
from relax_core.tools.check_env import main

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"
ENV = """
import random, subprocess, time
from dataclasses import dataclass
from relax_core.contracts.env import *

@dataclass(frozen=True)
class MineConfig({config}):
    name: str = "mine"
    max_turns: int = 3
    step_timeout_s: float = 20.0

class Mine(BaseInteractionEnv):
    def __init__(self, start, config):
        self.start = start
    def reset(self):
        return {reset}
    def step(self, action):
        {step}
    def close(self):
        {close}

SPEC = EnvSpec(name="mine", summary="s", config=MineConfig, open=Mine, isolated={isolated})
"""


def written(folder: Path, *, isolated: bool = False, **parts: str) -> str:
    given = {
        "config": "IsolatedConfig" if isolated else "InteractionConfig",
        "reset": "'go'",
        "step": "return StepResult(observation='again')",
        "close": "pass",
        **parts,
    }
    file = folder / "mine.py"
    file.write_text(ENV.format(isolated=isolated, **given))
    return str(file)


@pytest.mark.parametrize("name", ["number_guess", "calculator", "single_turn", "until_right.py", "phone_book.py"])
def test_environments_of_the_project_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(EXAMPLES / name) if name.endswith(".py") else name]) == 0
    assert "nothing is wrong" in capsys.readouterr().out


def test_the_python_tool_passes(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        try_sandbox()
    except SandboxRefused as error:
        pytest.skip(str(error))
    assert main(["python", "max_turns=2"]) == 0
    assert "tools: python" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"reset": "str(self.start.episode_seed)"}, "two episodes of a group open differently"),
        ({"reset": "str(random.random())"}, "two episodes of a group open differently"),
        ({"reset": "42"}, "format_observation returned 42"),
        ({"step": "return None"}, "step returned None"),
        ({"step": "return StepResult(reward=float('nan'))"}, "reward is nan"),
        ({"step": "return StepResult(done=True, info={'x': object()})"}, "names with values that JSON can hold"),
        ({"step": "return StepResult(observation=str(int(action.text)))"}, "step with an empty response: ValueError"),
        ({"close": "raise OSError('gone')"}, "close after reset: OSError: gone"),
        ({"step": "subprocess.Popen(['sleep', '60']); return StepResult(done=True)"}, "child processes are left"),
    ],
)
def test_what_is_wrong_is_named(
    parts: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([written(tmp_path, **parts)]) == 1
    assert message in capsys.readouterr().err


def test_a_call_that_hangs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([written(tmp_path, reset="time.sleep(30)"), "step_timeout_s=0.2"]) == 1
    assert "reset: no answer within 0.2 s" in capsys.readouterr().err


def test_an_isolated_env_is_checked_in_its_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the worker, the global random state belongs to the episode, so both episodes begin with the same draws."""
    assert main([written(tmp_path, isolated=True, reset="str(random.random())")]) == 0
    assert main([written(tmp_path, isolated=True, step="__import__('os')._exit(3)")]) == 1
    assert "exit code 3" in capsys.readouterr().err


def test_wrong_arguments_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["nowhere"], "env.name=nowhere is not known"),
        (["number_guess", "highest=many"], "env.highest"),
        (["number_guess", "lowest=1"], "env.lowest is not a setting"),
        (["calculator", "digits=0"], "env.digits=0"),
        (["number_guess", "highest"], "key=value"),
    ):
        assert main(arguments) == 1
        assert words in capsys.readouterr().err
