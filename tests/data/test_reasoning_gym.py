"""Tests data=reasoning_gym and its reward: errors without the package, rows and scores with the package."""

from __future__ import annotations

import re
from typing import Any

import pytest

from data_sources import reasoning_gym
from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.contracts.reward import RewardInput
from relax_core.data.sources import make_source
from relax_core.preflight import CHECKS
from relax_core.registry import find_reward
from relax_core.sandbox.worker_sandbox import worker_refusal

WORDS = ("data=reasoning_gym", "data.task=chain_sum", "reward=reasoning_gym")


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"reasoning-gym: pip install 'relax-core\[envs\]'"):
        load_config(WORDS)


@pytest.fixture
def package() -> None:
    pytest.importorskip("reasoning_gym", reason="pip install 'relax-core[envs]'")
    if refusal := worker_refusal():  # the reward runs only in the sandbox
        pytest.skip(refusal)


def test_the_task_is_the_sources_and_the_builtin_model_has_a_warm_start(package: None) -> None:
    config = load_config([*WORDS, "data.config.arguments.max_terms=3"], checks=CHECKS)
    assert config.data.task is None and config.data.config["task"] == "chain_sum"
    assert config.model.task == "arithmetic"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.task=chain_summ"], "data.task=chain_summ: reasoning-gym has no such task. Nearest: chain_sum"),
        (["data.config.task=leg_counting"], "data.task=chain_sum with data.config.task=leg_counting: name one task"),
        (["data.config.arguments.min_term=3"], "data.config.arguments={'min_term': 3} with data.task=chain_sum: "),
        (["data.config.arguments.min_terms=9"], "max_terms must be >= min_terms"),
        (["data.config.rows=0"], "data.config.rows=0: must be from 1 to 16777216"),
        (["data.config.row=5"], "data.config.row is not a setting of reasoning_gym. Nearest: data.config.rows"),
    ],
)
def test_what_cannot_be_is_told_with_key_value_and_fix(package: None, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config([*WORDS, *arguments])


def test_rows_are_the_same_each_time_and_none_is_a_held_out_one(package: None) -> None:
    one_digit = ("max_terms=2", "max_digits=1")
    words = [*WORDS, *(f"data.config.arguments.{word}" for word in one_digit), "data.config.rows=300"]
    data = load_config(words).data
    source, again = (make_source(data, seed=3, eval_rows=256) for _ in range(2))
    rows = [source.numbered(number) for number in range(300)]
    assert rows == [again.numbered(number) for number in range(300)]
    trained = {str(row["prompt"]) for row in rows}
    held_out = {str(row["prompt"]) for row in source.held_out().rows}
    assert len(trained) > 100 and len(held_out) > 5 and not trained & held_out
    for row in rows:
        (expression,) = re.findall(r": (-?\d [+-] \d) =$", row["prompt"])
        assert eval(expression) == int(row["answer"])


def test_answers_are_scored_by_the_package(package: None) -> None:
    row = make_source(load_config(WORDS).data, seed=0, eval_rows=1).numbered(7)
    spec = find_reward("reasoning_gym")
    right = sum(int(term.replace(" ", "")) for term in re.findall(r"[+-]? ?\d+", row["prompt"].partition(":")[2]))

    def scored(text: str) -> Any:
        given = RewardInput(response=text, stopped=True, answer=str(row["answer"]), row=row)
        assert spec.score is not None
        return spec.score(given, spec.config(name="reasoning_gym"))

    for text in (str(right), f"<think> 1 </think> {right}", f"<answer>1</answer> no: <answer> {right} </answer>"):
        assert (scored(text).reward, scored(text).exact, scored(text).answer) == (1.0, True, str(right))
    assert 0.0 <= scored("many").reward < 1.0 and not scored("many").exact
    assert 0.0 <= scored(f"<answer>{right}</answer> <answer>{right + 1}</answer>").reward < 1.0
    row = {"prompt": "?", "answer": "1"}
    with pytest.raises(ValueError, match="use reward=reasoning_gym with data=reasoning_gym"):
        scored("1")


def test_tasks_of_several_kinds_open(package: None) -> None:
    """Opens a task that limits the number of questions, a task with words, and a task without a stored answer."""
    for task in ("word_ladder", "spell_backward", "graph_color"):
        sizes = ("data.config.rows=50", "data.config.held_out=4")
        data = load_config(["data=reasoning_gym", f"data.task={task}", "reward=reasoning_gym", *sizes]).data
        row = make_source(data, seed=0, eval_rows=0).numbered(3)
        assert row["prompt"] and isinstance(row["answer"], str)
