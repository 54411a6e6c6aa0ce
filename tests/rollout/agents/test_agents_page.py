"""Checks docs/agents.md: the commands pass the checks before a start, and the lines match real tasks and answers."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.registry import find_env
from relax_core.rollout.agent_processes.agent_tasks import AgentTask, result_of
from relax_core.rollout.agents.agent_command import agent_command_of, max_concurrent_agents
from relax_core.rollout.agents.external_agents import SESSIONS
from relax_core.tools.make_tiny import tiny_model_folder

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = (REPOSITORY / "docs" / "agents.md").read_text()
LINES = [line.strip() for line in PAGE.splitlines() if line.startswith("    ")]
COMMANDS = [line for line in LINES if line.startswith("python -m relax_core ")]
EXAMPLE = str(REPOSITORY / "examples" / "agents" / "calculator.py")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a working folder with the files that the page names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "my_model").symlink_to(tiny_model_folder("tiny_qwen3", task="arithmetic"))
    (tmp_path / "my_agent.py").touch()
    (tmp_path / "run.sh").touch()
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n')
    python = tmp_path / ".venv-agents" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return tmp_path


def test_the_commands_of_the_page(here: Path) -> None:
    """Each command passes the checks and configures the agents that the page describes."""
    found = [load_config(shlex.split(command)[3:]) for command in COMMANDS]
    words = [agent_command_of(config, find_env(config.env.name)) for config in found]
    own = [sys.executable, "my_agent.py"]
    assert words == [[sys.executable, "examples/agents/calculator.py"], own, ["bash", "run.sh"], own, []]
    assert {config.agent.cwd for config in found[:4]} == {str(here)} and found[4].agent.cwd is None
    assert found[2].agent.python == str(here / ".venv-agents/bin/python")
    assert [max_concurrent_agents(config) for config in found[1:4:2]] == [2 * 8 * found[1].algo.group_size, 4]
    assert [config.reward.name for config in found] == ["env", *["math"] * 4]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["agent.command=python gone.py"], "agent.command: there is no file gone.py in agent.cwd="),
        (["agent.command=no-such-agent --x"], "agent.command: there is no program no-such-agent"),
        (["agent.command=./run.sh"], "there is no program ./run.sh"),
        (['agent.command=python "my_agent.py'], "No closing quotation. Close the quote"),
        (["agent.command= "], "agent.command is empty"),
        (["agent.command=python my_agent.py", "agent.cwd=gone"], "gone: no such folder"),
        (["agent.command=python my_agent.py", "agent.python=gone/python"], "gone/python: no such program"),
        (["agent.command=python my_agent.py", "agent.history=all"], "agent.history=all: use continue or template"),
        (["agent.command=python my_agent.py", "endpoint.host=0.0.0.0"], "endpoint.host=0.0.0.0 with agents that Relax"),
        (["agent.command=python my_agent.py", "rollout.lockstep=true"], "rollout.lockstep=true with env=agent"),
        (["agent.workers=2"], "agent.workers=2 without agent.command"),
        (["endpoint.port=65535", "rollout.workers=2"], "exceeds port 65535"),
        (["endpoint.max_sessions=0"], "endpoint.max_sessions is not a key any more. agent.workers bounds"),
        (["agent.timeout_s=0"], "agent.timeout_s=0.0: must be more than 0"),
        (
            ["env=number_guess", "agent.command=python my_agent.py"],
            "agent.command=python my_agent.py with env=number_guess",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_start(here: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(["experiment=calculator", *([] if "env=number_guess" in overrides else ["env=agent"]), *overrides])
    assert message in str(refused.value)


def test_the_lines_that_agents_get_and_give() -> None:
    """The task on the page has the keys of a real task, and the answers on the page are valid results."""
    given = [json.loads(line) for line in LINES if line.startswith("{")]
    task = AgentTask(uid="g00000007.3", attempt=0, row={}, key="k", base_url="http://127.0.0.1:4711", evaluation=False)
    (shown,) = [line for line in given if "base_url" in line]
    assert shown.keys() == task.as_json().keys() and shown["base_url"] == task.as_json()["base_url"]
    results = [result_of(line, what="the page") for line in given if "base_url" not in line]
    assert [result.reward for result in results] == [1.0, 1.0] and results[0].metrics == {"calls": 2.0}
    variables = {*task.urls(), "RELAX_TASK", "RELAX_RESULT", "RELAX_UID", "RELAX_ATTEMPT", "RELAX_EVALUATION"}
    table = PAGE[PAGE.index("| Variable |") :].split("\n\n")[0]
    assert set(re.findall(r"`([A-Z_]+)`", table)) == variables
    routes = [line.rpartition("/v1/")[2] for line in LINES if line.startswith("curl ")]
    assert [f"/v1/{route}" for route in routes] == [SESSIONS, f"{SESSIONS}/SESSION/reward", f"{SESSIONS}/SESSION/end"]
