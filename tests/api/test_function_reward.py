"""Tests a function as a reward: its transfer to the processes of a run, and refused functions."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from relax_core.api.function_reward import FUNCTION_FILE, function_text, write_private
from relax_core.config.errors import ConfigError
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.registry import PluginError, find_reward
from relax_core.rollout.rewards.reward_pool import RewardPool


def scored(file: Path, *responses: str) -> list[RewardOutput]:
    """Scores like a worker process of a run."""
    spec = find_reward(str(file))
    row = {"prompt": "p"}
    with RewardPool(spec, spec.config(name=str(file)), workers=1) as pool:
        return asyncio.run(
            pool.score([RewardInput(response=text, stopped=True, answer="abc", row=row) for text in responses])
        )


def written(folder: Path, function: object) -> Path:
    file = folder / FUNCTION_FILE
    write_private(file, function_text(function))  # type: ignore[arg-type]
    return file


def test_a_closure_crosses_by_value_and_its_lines_are_named(tmp_path: Path) -> None:
    scale = 0.25

    def mine(given: RewardInput) -> float:
        if given.response == "x":
            return given.row["price"]  # type: ignore[no-any-return]
        return scale * len(given.response)

    file = written(tmp_path, mine)
    assert file.stat().st_mode & 0o777 == 0o600
    assert find_reward(str(file)).isolated
    outputs = scored(file, "abc", "x")
    assert [output.reward for output in outputs] == [0.75, None]
    line = mine.__code__.co_firstlineno + 2
    assert outputs[1].reason == f"KeyError: 'price' ({__file__}, line {line})"


@pytest.mark.parametrize(
    "program",
    [
        "bonus = 2\nreward = lambda given: bonus * len(given.response)",
        "class Reward:\n    def __call__(self, given):\n        return 2 * len(given.response)\nreward = Reward()",
        "import helper\nreward = helper.reward",
    ],
)
def test_what_a_script_or_a_notebook_defines_crosses(tmp_path: Path, program: str) -> None:
    """The function is not defined in a file (like a notebook's cell), or it is in a module that workers cannot find."""
    (tmp_path / "helper.py").write_text("def reward(given):\n    return 2 * len(given.response)\n")
    write = (
        "from pathlib import Path\nfrom relax_core.api.function_reward import *\n"
        f"write_private(Path({str(tmp_path)!r}) / FUNCTION_FILE, function_text(reward))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
    subprocess.run([sys.executable, "-c", f"{program}\n{write}"], env=environment, check=True, timeout=120)
    assert [output.reward for output in scored(tmp_path / FUNCTION_FILE, "abc")] == [6.0]


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o602])
def test_a_file_that_others_may_read_or_write_is_refused_unread(tmp_path: Path, mode: int) -> None:
    hit = tmp_path / "hit"
    file = written(tmp_path, _Touches(hit))
    hit.unlink(missing_ok=True)
    file.chmod(mode)
    with pytest.raises(PluginError, match=r"PermissionError: .*this user alone.*chmod 600"):
        find_reward(str(file))
    assert not hit.exists()
    file.chmod(0o600)
    find_reward(str(file))
    assert hit.exists()


class _Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, given: RewardInput) -> float:
        return 0.0

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.__dict__.update(state)
        self.path.touch()


def test_what_cannot_be_a_reward_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be called with one argument, a RewardInput"):
        function_text(lambda: 1.0)  # type: ignore[arg-type,misc]
    with pytest.raises(ConfigError, match="cannot be called with one argument, a RewardInput"):
        function_text(3)  # type: ignore[arg-type]

    async def waits(given: RewardInput) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=r"it is async, .* a plug-in file"):
        function_text(waits)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cannot be sent to the run's processes: TypeError.*lock"):
        function_text(lambda given: float(lock.locked()))
