"""Tests the env with a tool that runs Python code: results, mistakes of the model, and invalid settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from envs.python import LIMITS, SPEC, PythonConfig, PythonTool, check, python
from relax_core.contracts.env import Action, EpisodeStart
from relax_core.contracts.tool_calls import ToolCall
from relax_core.sandbox.run_code import SandboxRefused, try_sandbox


def result_of(code: object, *, sandbox: str) -> str:
    config = PythonConfig(sandbox=sandbox)
    env = PythonTool(EpisodeStart(row={"prompt": "how many?"}, group_seed=0, episode_seed=0), config)
    assert env.reset() == "how many?"
    call = ToolCall(name="python", arguments={"code": code})
    step = env.step(Action(text="", stopped=True, tool_calls=(call,)))
    (message,) = step.observation
    assert message["role"] == "tool" and not step.done
    text: str = message["content"]
    return text


@pytest.fixture(params=["bwrap", "none"])
def sandbox(request: pytest.FixtureRequest) -> str:
    if request.param == "bwrap":
        try:
            try_sandbox()
        except SandboxRefused as error:
            pytest.skip(str(error))
    name: str = request.param
    return name


def test_code_and_its_ends_are_shown(sandbox: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dataclasses.replace(LIMITS, wall_s=30.0, cpu_s=1, output_bytes=100)
    monkeypatch.setattr("envs.python.LIMITS", limits)
    assert result_of("print(6 * 7)", sandbox=sandbox) == "42"
    assert result_of("pass", sandbox=sandbox) == "[no output]"
    assert result_of("print(1); exit(3)", sandbox=sandbox) == "1\n[exit code 3]"
    assert result_of("while True: pass", sandbox=sandbox) == "[ended after 1 s of CPU time]"
    assert result_of("while True: print('xxxx')", sandbox=sandbox) == "xxxx\n" * 20 + "[ended at 100 bytes of output]"
    assert result_of("print('; rm -rf $HOME `x`')", sandbox=sandbox) == "; rm -rf $HOME `x`"
    assert result_of(42, sandbox=sandbox).startswith("Wrong arguments for the tool python")


def test_an_answer_ends_the_episode_and_counts_calls() -> None:
    env = PythonTool(EpisodeStart(row={"prompt": "p"}, group_seed=0, episode_seed=0), PythonConfig(sandbox="none"))
    calls = (ToolCall(name="python", arguments={"code": "1/0"}), ToolCall(name="sh", arguments={}))
    assert len(env.step(Action(text="", stopped=True, tool_calls=calls)).observation) == 2
    assert env.step(Action(text="", stopped=True, parse_error="broken")).observation == "broken"
    step = env.step(Action(text="42", stopped=True))
    assert step.done and step.reward is None and step.info == {"tool_calls": 2, "failed_tool_calls": 2}


def test_the_calls_of_a_response_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many slow calls are a mistake of the model. The step never exceeds env.step_timeout_s."""
    monkeypatch.setattr("envs.python.LIMITS", dataclasses.replace(LIMITS, wall_s=1.0))
    config = PythonConfig(sandbox="none")
    env = PythonTool(EpisodeStart(row={"prompt": "p"}, group_seed=0, episode_seed=0), config)
    slow = ToolCall(name="python", arguments={"code": "import time; time.sleep(600)"})
    step = env.step(Action(text="", stopped=True, tool_calls=(slow, slow, slow)))
    first, *other_answers = [message["content"] for message in step.observation]
    assert first == "[ended after 1 s]"
    assert other_answers == ["[not run: the calls of a response have 1 s together]"] * 2


def test_wrong_settings_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check(PythonConfig(sandbox="none"))
    for change, words in (
        ({"sandbox": "docker"}, "env.sandbox=docker: use bwrap or none"),
        ({"step_timeout_s": 10.0}, "Raise env.step_timeout_s"),
    ):
        with pytest.raises(ValueError, match=words):
            check(dataclasses.replace(PythonConfig(sandbox="none"), **change))  # type: ignore[arg-type]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"apt-get install bubblewrap.*env.sandbox=none"):
        check(PythonConfig())


def test_the_tool_is_described() -> None:
    assert SPEC.tools is not None and list(SPEC.tools({}, PythonConfig())) == [python]
