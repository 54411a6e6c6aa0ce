"""Checks docs/episodes.md and docs/envs.md: Relax accepts every command of the pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.learning import SUITES, command_line
from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.preflight import CHECKS
from relax_core.registry import find_env
from relax_core.tools.lineage import parse_filters
from relax_core.tools.play import main as play

PAGE = Path(__file__).resolve().parents[2] / "docs" / "episodes.md"
COMMANDS = re.findall(r"^ {4}(\S.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
RUNS = [command for command in COMMANDS if command.startswith("python -m relax_core ")]
OF_ENVS = re.findall(r"^ {4}python -m relax_core (\S.*)$", PAGE.with_name("envs.md").read_text("utf-8"), re.MULTILINE)
# tests/envs has servers for these pages; the last page needs the environment of `make agents-env`.
ASKS_A_SERVER = ("env=mcp", "env=openenv", "env=verifiers")
PACKAGES = {"env=gymnasium": "gymnasium", "env=textarena": "textarena", "data=reasoning_gym": "reasoning_gym"}


@pytest.mark.parametrize("command", RUNS)
def test_a_run_of_the_page_passes_all_checks(command: str) -> None:
    config = load_config(shlex.split(command)[3:], checks=CHECKS)
    assert find_env(config.env.name).has_turns and config.reward.name == "env"


@pytest.mark.parametrize("command", [command for command in OF_ENVS if not command.startswith(ASKS_A_SERVER)])
def test_a_run_of_the_page_of_environments_lacks_at_most_the_users_own_files(command: str) -> None:
    words = shlex.split(command)
    for word in words:
        if word in PACKAGES:
            pytest.importorskip(PACKAGES[word])
    if "model.path=/models/mine" not in words:
        load_config(words, checks=CHECKS)
        return
    with pytest.raises(ConfigError) as caught:
        load_config(words, checks=CHECKS)
    assert caught.value.problems and all("no such f" in problem for problem in caught.value.problems)


def test_the_other_commands_are_known() -> None:
    """tests/integration/test_turns.py executes them: it plays with a checkpoint and reads the turns of a run."""
    not_runs = [shlex.split(command) for command in COMMANDS if command not in RUNS]
    evaluates, checkpoint_plays, person_plays, tells, learns = not_runs
    assert evaluates == ["relax", "eval", "RUN"] and tells[:3] == ["relax", "lineage", "RUN"]
    assert parse_filters(tells[3:]) == {"uid": "g00000012.3"}
    for plays in (checkpoint_plays, person_plays):
        assert plays[:3] == ["python", "-m", "relax_core.tools.play"]
    assert checkpoint_plays[3:] == ["checkpoint=RUN", "--episodes=3"]
    assert play(person_plays[3:], ask=lambda shown: "4") == 0
    assert learns[:3] == ["python", "-m", "benchmarks.learning"]
    assert command_line(learns[3:]).only == list(SUITES["episodes"])
