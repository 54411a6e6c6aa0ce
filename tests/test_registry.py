"""Tests plug-ins by name, by file and by entry point, and the errors of broken plug-ins."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.compose import load_config
from relax_core.registry import (
    ALL_KINDS,
    PluginError,
    find,
    find_algorithm,
    find_env,
    find_reward,
    find_sink,
    known,
    names,
)

REPOSITORY = Path(__file__).resolve().parents[1]
REWARD = """
from dataclasses import dataclass
from relax_core.contracts.reward import RewardInput, RewardConfig, RewardOutput, RewardSpec

@dataclass(frozen=True)
class LengthConfig(RewardConfig):
    timeout_s: float = 1.0
    target: int = 5

def score(sample: RewardInput, config: LengthConfig) -> RewardOutput:
    return RewardOutput(reward=float(len(sample.response) == config.target))

SPEC = RewardSpec(name="length", summary="Right length.", config=LengthConfig, score=score)
"""


def write(folder: Path, text: str, name: str = "length.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_builtin_plugins() -> None:
    assert find_algorithm("grpo").name == "grpo"
    assert find_reward("math").isolated
    assert find_env("single_turn").name == "single_turn"
    assert find_sink("jsonl").name == "jsonl"
    for kind in ALL_KINDS:
        assert list(known(kind)) == names(kind)
        assert all(known(kind).values())


def test_listing_imports_no_torch() -> None:
    code = (
        "import sys; from relax_core.registry import ALL_KINDS, names; print([names(kind) for kind in ALL_KINDS]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'algorithms.grpo')))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "grpo" in result.stdout


def test_unknown_name() -> None:
    with pytest.raises(PluginError, match=r"algo.name=grppo is not known. What exists: .*grpo.*Nearest: grpo\."):
        find_algorithm("grppo")


def test_file_plugin_brings_its_config(tmp_path: Path) -> None:
    file = write(tmp_path, REWARD)
    config = load_config([f"reward.name={file}", "reward.target=7"])
    assert (config.reward.target, config.reward.timeout_s) == (7, 1.0)


def test_file_plugin_in_an_option_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path, REWARD)
    assert load_config(["reward=plugin", f"reward.name={file}"]).reward.target == 5


def test_config_of_a_file_plugin_cross_to_another_process(tmp_path: Path) -> None:
    file = write(tmp_path, REWARD)
    config = load_config([f"reward.name={file}", "reward.target=7"]).reward
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).target)"
    result = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(config), cwd=REPOSITORY, capture_output=True, timeout=300
    )
    assert result.stdout.strip() == b"7", result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = 1 / 0\n", r"length.py, line 2: ZeroDivisionError"),
        ("x = 1\n\nimport no_such_library\n", r"length.py, line 3: ModuleNotFoundError: No module named 'no_such"),
        ("x = 1\ndef f(:\n", r"length.py, line 2: SyntaxError"),
        ("def f():\n    return g()\n\n\nx = f()\n", r"length.py, line 2: NameError"),
        ("x = 1\n", r"length.py has no SPEC. Set SPEC = RewardSpec"),
        ("SPEC = 3\n", r"length.py has a SPEC of type int"),
        (
            REWARD.replace("config=LengthConfig", "config=dict"),
            r"SPEC.config must be a dataclass under RewardConfig",
        ),
    ],
)
def test_a_broken_plugin_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(PluginError, match=message):
        find_reward(str(file))


SINK = """
from relax_core.contracts.sink import BaseSink, SinkConfig, SinkSpec

class Nothing(BaseSink):
    def write(self, batch):
        pass

SPEC = SinkSpec(name="nothing", summary="Keeps nothing.", config=SinkConfig, open=lambda start, config: Nothing())
"""
DATA = """
from relax_core.contracts.data import BaseDataSource, DataSourceConfig, DataSourceSpec

class Rows(BaseDataSource):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        return {"prompt": str(number), "answer": str(number)}

SPEC = DataSourceSpec(
    name="three", summary="Three rows.", config=DataSourceConfig, open=lambda config: Rows()
)
"""


def test_entry_points_of_every_kind(tmp_path: Path) -> None:
    """For importlib.metadata the package looks installed: it has modules and a dist-info folder."""
    write(tmp_path, REWARD, "length_reward.py")
    write(tmp_path, SINK, "nothing_sink.py")
    write(tmp_path, DATA, "three_rows.py")
    info = tmp_path / "length_reward-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: length-reward\nVersion: 1.0\n")
    groups = {
        "rewards": "length = length_reward:SPEC",
        "sinks": "nothing = nothing_sink:SPEC",
        "data_sources": "three = three_rows:SPEC",
    }
    text = "".join(f"[relax.{group}]\n{point}\n" for group, point in groups.items())
    (info / "entry_points.txt").write_text(text)
    code = (
        "from relax_core.registry import find, names, package_of; from relax_core.config.compose import load_config; "
        "settings = load_config(['reward=length']).reward; "
        "by_name = load_config(['data=three', 'data.eval_size=0', 'eval.every=0', 'model.task=arithmetic']).data; "
        "assert (by_name.name, by_name.task) == ('three', None); "
        "assert load_config(['data.name=three', 'data.eval_size=0', 'model.task=arithmetic']).data.task is None; "
        "assert load_config(['data.name=mine']).data.task == 'reverse_digits'; "  # a name that Relax does not know
        "found = [find(*one).summary for one in (('reward', 'length'), ('sink', 'nothing'), ('data', 'three'))]; "
        "print(*found, 'length' in names('reward'), settings.target, package_of('sink', 'nothing'))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.strip() == "Right length. Keeps nothing. Three rows. True 5 length-reward", result.stderr


@pytest.mark.parametrize(("kind", "text", "key"), [("sink", SINK, "tracker.sinks"), ("data", DATA, "data.name")])
def test_a_file_of_another_kind_is_refused_with_the_key_that_named_it(
    tmp_path: Path, kind: Any, text: str, key: str
) -> None:
    file = write(tmp_path, text)
    assert find(kind, str(file)).name in ("nothing", "three")
    with pytest.raises(PluginError, match=rf"{key}=.*other.py: .*other.py has a SPEC of type RewardSpec"):
        find(kind, str(write(tmp_path, REWARD, "other.py")))
    with pytest.raises(PluginError, match=rf"{key}=nobody is not known"):
        find(kind, "nobody")


def test_builtins_are_found_whatever_lies_beside_the_run(tmp_path: Path) -> None:
    """The project has packages with the names of builtins. Its plug-in still finds modules in its own folder."""
    for name in ("algorithms", "rewards", "envs", "data_sources", "launchers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('of the project')\n")
    (tmp_path / "rewards" / "common.py").write_text("TARGET = 7\n")
    own = REWARD.replace("target: int = 5", "target: int = TARGET")
    write(tmp_path / "rewards", f"from rewards.common import TARGET\n{own}", "mine.py")
    command = [sys.executable, "-m", "relax_core", "plan=true", "reward.name=rewards/mine.py", "algo=ppo"]
    planned = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "can start." in planned.stdout, planned.stderr
    code = (
        "import pickle, sys; sys.path.insert(0, '.'); from relax_core.config.compose import load_config;"
        "config = load_config(['reward.name=rewards/mine.py', 'algo=ppo']);"
        "from relax_core.registry import names; from rewards.math import SPEC;"
        "print(pickle.loads(pickle.dumps(config)).reward.target, SPEC.name, 'mine' in names('reward'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["7", "math", "False"], done.stderr
