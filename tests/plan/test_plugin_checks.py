"""Tests trial calls of plug-ins before a start, in real workers: plug-ins that raise, return nonsense, hang, crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.preflight import CHECKS, plugin_problems, settle
from relax_core.rollout.trial import plugin_trial

REWARD = """
import os, signal, time
from dataclasses import dataclass
from relax_core.contracts.reward import RewardConfig, RewardOutput, RewardSpec

@dataclass(frozen=True)
class Config(RewardConfig):
    how: str = "number"
    check: str = ""

def check(config):
    if config.check:
        raise ValueError(config.check)

def score(given, config):
    if config.how == "hang":
        time.sleep(600)
    if config.how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if config.how == "raise":
        return given.row["price"]
    if config.how == "first" and given.row["prompt"] == "p0":
        raise ValueError("this row alone")
    return {"text": "yes", "none": None, "nothing": RewardOutput(reward=None, reason="unreadable")}.get(config.how, 1)

SPEC = RewardSpec(name="odd", summary="s", config=Config, score=score, check=check)
"""

ENV = """
from relax_core.contracts.env import EnvConfig, EnvSpec
SPEC = EnvSpec(name="odd", summary="s", config=EnvConfig, messages=lambda row, config: row["prompt"])
"""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "odd.py"
    path.write_text(REWARD)
    return str(path)


@pytest.fixture
def rows(tmp_path: Path) -> list[str]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{n}", "answer": f"a{n}"}) + "\n" for n in range(20)))
    return ["data=file", f"data.path={path}", "data.eval_size=4", "eval.rows=4", "model.task=reverse_digits"]


def problems(plugin: str, rows: list[str], *overrides: str) -> list[str]:
    return plugin_problems(load_config([f"reward.name={plugin}", *rows, *overrides]))


@pytest.mark.parametrize(
    ("how", "arguments"),
    [
        ("text", ("reward odd (", "score returned 'yes' of type str", "Wanted: a finite number")),
        ("none", ("score returned None of type NoneType",)),
        ("nothing", ("no reward: unreadable", "None of the 3 rows")),
        ("raise", ("KeyError: 'price' (", "odd.py, line 21)", "rows.jsonl, line 1", "None of the 3 rows")),
        ("crash", ("its process died (signal SIGSEGV)", "rows.jsonl, line 1")),
    ],
)
def test_a_reward_that_cannot_work_is_told_before_the_start(
    plugin: str, rows: list[str], how: str, arguments: tuple[str, ...]
) -> None:
    (problem,) = problems(plugin, rows, f"reward.how={how}")
    assert problem.startswith(f"reward.name={plugin}: ")
    for word in arguments:
        assert word in problem


def test_a_reward_that_hangs_is_killed_and_told(plugin: str, rows: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_core.preflight.CALL_S", 0.2)
    (problem,) = problems(plugin, rows, "reward.how=hang", "reward.timeout_s=0.5")
    assert "the score of " in problem and "did not end within 0.5 s" in problem


@pytest.mark.parametrize("how", ["number", "first"])
def test_a_reward_that_works_for_some_row_may_start(plugin: str, rows: list[str], how: str) -> None:
    assert problems(plugin, rows, f"reward.how={how}") == []


OF_GROUPS = """
from relax_core.contracts.reward import RewardConfig, RewardSpec

async def score_group(given, config):
    return {}

SPEC = RewardSpec(name="odd", summary="s", config=RewardConfig, score_group=score_group)
"""


@pytest.mark.parametrize(
    ("came", "message"),
    [
        ("[1.0 for one in given]", ""),
        (
            "[1.0]",
            "score_group returned [1.0] of type list. Wanted: a list of 2 rewards, one an answer, in order; 1 came",
        ),
        ("1.0", "score_group returned 1.0 of type float. Wanted: a list of 2 rewards"),
        ("['yes', 1.0]", "score_group returned entry 0='yes' of type str. Wanted: a finite number"),
    ],
)
def test_an_async_reward_of_whole_groups_is_tried_with_two_answers(
    tmp_path: Path, rows: list[str], came: str, message: str
) -> None:
    path = tmp_path / "odd.py"
    path.write_text(OF_GROUPS.format(came))
    found = problems(str(path), rows)
    assert len(found) == bool(message) and all(message in problem for problem in found)


def test_an_env_that_returns_text_is_told_before_the_prompts_are_made(tmp_path: Path, rows: list[str]) -> None:
    env = tmp_path / "odd_env.py"
    env.write_text(ENV)
    config = load_config([f"env.name={env}", *rows, "reward=math"])
    settled, found = settle(config)
    assert settled is config
    assert any("env odd (" in problem and "returned 'p0' of type str" in problem for problem in found)


def test_an_env_that_hangs_is_called_in_no_process_that_cannot_be_killed(
    tmp_path: Path, rows: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = tmp_path / "odd_env.py"
    env.write_text("import time\n" + ENV.replace('row["prompt"]', "time.sleep(600)"))
    monkeypatch.setattr("relax_core.preflight.CALL_S", 0.2)
    with pytest.raises(ConfigError) as caught:
        load_config([f"env.name={env}", *rows, "reward=math"], checks=CHECKS, settle=settle)
    assert any(
        "messages for " in problem and "did not end within 0.2 s" in problem for problem in caught.value.problems
    )


SLOW = """
import time
from dataclasses import dataclass
from relax_core.contracts.env import BaseInteractionEnv, EnvSpec, InteractionConfig

@dataclass(frozen=True)
class Config(InteractionConfig):
    name: str = "slow"

class Slow(BaseInteractionEnv):
    def __init__(self, start, config):
        pass
    def reset(self):
        time.sleep(1.0)
        return "?"
    def step(self, action):
        return None

SPEC = EnvSpec(name="slow", summary="s", config=Config, open=Slow)
"""


@pytest.mark.parametrize(("limit_s", "message"), [(60, ""), (0.6, "raise env.step_timeout_s"), (0.1, "reset for ")])
def test_a_slow_reset_has_the_time_that_it_has_in_a_run(
    tmp_path: Path, rows: list[str], monkeypatch: pytest.MonkeyPatch, limit_s: float, message: str
) -> None:
    env = tmp_path / "slow.py"
    env.write_text(SLOW)
    monkeypatch.setattr("relax_core.preflight.CALL_S", 0.5)
    found = plugin_problems(
        load_config([f"env.name={env}", *rows, "reward=exact_match", f"env.step_timeout_s={limit_s}"])
    )
    assert len(found) == bool(message) and all(message in problem and "reset for " in problem for problem in found)


def test_a_row_that_an_env_cannot_take_counts_as_a_bad_row(tmp_path: Path, rows: list[str]) -> None:
    env = tmp_path / "odd_env.py"
    single_turn = (Path(__file__).parents[2] / "envs" / "single_turn.py").read_text()
    env.write_text(single_turn.replace('row["prompt"]', '{"p0": 1}.get(row["prompt"], 0) and 1 // 0 or row["prompt"]'))
    words = [f"env.name={env}", *rows, "reward=math"]
    assert load_config([*words, "data.max_bad_rows=0.2"], checks=CHECKS, settle=settle).env.name == str(env)
    with pytest.raises(ConfigError, match=r"1 of the 16 checked rows .* data\.max_bad_rows=0\.01"):
        load_config([*words, "data.max_bad_rows=0.01"], checks=CHECKS, settle=settle)


def test_an_algorithm_is_tried_on_a_made_up_group(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "plugins" / "quantile_baseline.py"
    assert plugin_problems(load_config(["algo=plugin", f"algo.name={example}", "mode=colocate"])) == []
    wrong = tmp_path / "wrong.py"
    wrong.write_text(example.read_text().replace("[inputs.sample_ids]", ""))
    (problem,) = plugin_problems(load_config(["algo=plugin", f"algo.name={wrong}", "mode=colocate"]))
    assert "advantages returned a Tensor of shape [8]" in problem and "shape [24]" in problem


def test_relaxes_own_plugins_are_tried_on_the_users_data_alone(
    rows: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[plugin_trial.Request] = []
    monkeypatch.setattr("relax_core.preflight.try_plugins", lambda request: asked.append(request) or [])
    assert plugin_problems(load_config([])) == []
    assert asked == []
    plugin_problems(load_config([*rows, "reward=math"]))
    assert [(request.reward[0], request.env[0], request.algo[0]) for request in asked] == [("math", "single_turn", "")]
    assert [where.rpartition(" ")[2] for where, _ in asked[0].rows] == ["1", "9", "16"]


def test_config_that_make_no_sense_are_told_without_a_trial(plugin: str, rows: list[str]) -> None:
    with pytest.raises(ConfigError, match="no such thing"):
        problems(plugin, rows, "reward.check='no such thing'", "reward.how=raise")
    with pytest.raises(ConfigError, match=r"reward.max_failed=1.5: a share"):
        problems(plugin, rows, "reward.max_failed=1.5")


TURNS = '''
from relax_core.contracts.env import BaseInteractionEnv, EnvSpec, InteractionConfig, StepResult

class Odd(BaseInteractionEnv):
    def __init__(self, start, config):
        self.prompt = start.row["prompt"]

    async def reset(self):
        return HERE

    def step(self, action):
        return StepResult(done=True)

def look(where: str) -> str:
    """Looks.

    Args:
        where: a place
    """
    return where

SPEC = EnvSpec(name="odd", summary="s", config=InteractionConfig, open=Odd, tools=lambda row, config: [TOOLS])
'''


@pytest.mark.parametrize(
    ("reset", "arguments"),
    [
        ("self.prompt", ()),
        ("[{'role': 'user', 'content': [{'type': 'image'}]}]", ("env odd (", "Wanted: text, or a list of parts")),
        ("self.missing", ("rows.jsonl, line 1", "no attribute 'missing'")),
    ],
)
def test_an_env_with_turns_opens_an_episode(
    tmp_path: Path, rows: list[str], reset: str, arguments: tuple[str, ...]
) -> None:
    file = tmp_path / "turns.py"
    file.write_text(TURNS.replace("HERE", reset).replace("TOOLS", "look"))
    keys = (f"env.name={file}", "eval.every=0", "engine.context_length=192", "reward=reverse_digits")
    found = plugin_problems(load_config([*rows, *keys]))
    assert len(found) == bool(arguments) and all(word in found[0] for word in arguments), found


def test_two_tools_of_one_name_are_told(tmp_path: Path, rows: list[str]) -> None:
    file = tmp_path / "turns.py"
    file.write_text(TURNS.replace("HERE", "self.prompt").replace("TOOLS", "look, look"))
    keys = (f"env.name={file}", "eval.every=0", "engine.context_length=192", "reward=reverse_digits")
    (found,) = plugin_problems(load_config([*rows, *keys]))
    assert "tool look: two tools have this name. Rename one" in found and "rows.jsonl, line 1" in found


SOURCE = """
import os, random, time
from relax_core.contracts.data import BaseDataSource, DataSourceConfig, DataSourceSpec

class Odd(BaseDataSource):
    def __len__(self):
        return 5

    def __getitem__(self, number):
        return ROW

def open_it(config):
    OPEN
    return Odd()

SPEC = DataSourceSpec(name="odd", summary="s", config=DataSourceConfig, open=open_it)
"""


@pytest.mark.parametrize(
    ("row", "opens", "arguments"),
    [
        ("{'prompt': 'a', 'answer': 'a'}", "pass", ()),
        ("{'prompt': 'a', 'answer': 'a'}", "time.sleep(600)", ("to open it did not end within 0.5 s",)),
        ("time.sleep(600)", "pass", ("row 0 did not end within 0.2 s",)),
        ("{'prompt': 'a', 'answer': 'a'}", "os._exit(3)", ("to open it: its process died (exit code 3)",)),
        ("{'prompt': 'a', 'answer': 'a'}", "raise OSError('no network')", ("cannot be opened: OSError: no network (",)),
        (
            "{'prompt': 'a', 'answer': random.random()}",
            "pass",
            ("row 0 differs when the source is opened again",),
        ),
        ("['a']", "pass", ("data source odd (", "returned ['a'] of type list. Wanted: a mapping with text keys")),
        ("{'prompt': 'a', 'answer': object}", "pass", ("row 0: ", "A row holds text, numbers, lists and mappings.")),
    ],
    ids=["good", "open hangs", "row hangs", "crashes", "raises", "changes", "no mapping", "no data"],
)
def test_a_data_source_is_tried_before_any_process_that_cannot_be_killed_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, opens: str, arguments: tuple[str, ...]
) -> None:
    file = tmp_path / "odd_source.py"
    file.write_text(SOURCE.replace("ROW", row).replace("OPEN", opens))
    monkeypatch.setattr("relax_core.preflight.CALL_S", 0.2)
    monkeypatch.setattr("relax_core.preflight.OPEN_S", 0.5)
    config = load_config([f"data.name={file}", "model.task=arithmetic", "data.eval_size=0", "eval.every=0"])
    settled, found = settle(config)
    assert len(found) == bool(arguments) and all(word in found[0] for word in arguments), found
    assert (settled.engine.context_length is None) == bool(arguments)
    if arguments:
        with pytest.raises(ConfigError, match=r"odd_source.py"):
            load_config([f"data.name={file}", "model.task=arithmetic"], checks=CHECKS, settle=settle)
