"""Tests the calculator env: it answers calls, reports mistakes, and scores the last number of an answer."""

from __future__ import annotations

import asyncio
import re

import pytest

from envs.calculator import SPEC, Calculator, CalculatorConfig
from relax_core.contracts.env import EpisodeStart, StepResult
from relax_core.data.tool_parsers import read_action

TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}


def played(*responses: str) -> list[StepResult]:
    async def scene() -> list[StepResult]:
        game = Calculator(EpisodeStart(row={}, group_seed=3, episode_seed=0), CalculatorConfig())
        a, b = map(int, re.findall(r"\d+", await game.reset()))
        texts = [text.format(a=a, b=b, product=a * b) for text in responses]
        actions = [read_action(text, stopped=True, parser="hermes", tools=[TOOL]) for text in texts]
        return [await game.step(action) for action in actions]

    return asyncio.run(scene())


CALL = '<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def test_a_call_is_answered_and_the_answer_is_scored() -> None:
    call, done = played(CALL, "It is {product}.")
    ((result,), (expected,)) = call.observation, played("{product}")
    assert result["role"] == "tool" and not call.done and int(result["content"]) > 0
    assert done == StepResult(reward=1.0, done=True, info={"tool_calls": 1})
    assert expected.reward == 1.0


def test_several_calls_have_several_results() -> None:
    (step,) = played(CALL + CALL)
    assert [message["role"] for message in step.observation] == ["tool", "tool"]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ('<tool_call>{{"name": "divide", "arguments": {{}}}}</tool_call>', "There is no tool 'divide'"),
        ('<tool_call>{{"name": "multiply", "arguments": {{"a": 1}}}}</tool_call>', "missing required field `b`"),
        ('<tool_call>{{"name": "multiply", "arguments": {{"a": 1, "b": "2"}}}}</tool_call>', "got `str`"),
    ],
)
def test_a_mistake_in_a_call_is_an_observation(response: str, message: str) -> None:
    (step,) = played(response)
    assert message in step.observation[0]["content"] and not step.done and step.reward is None


def test_a_call_that_cannot_be_read_is_told() -> None:
    (step,) = played('<tool_call>{{"name": ')
    assert "does not end with </tool_call>" in step.observation and not step.done


@pytest.mark.parametrize("answer", ["", "no idea", "{product} or 5", "1{product}"])
def test_anything_else_ends_the_episode_without_a_point(answer: str) -> None:
    (step,) = played(answer)
    assert step.done and step.reward == 0.0


def test_the_question_has_the_same_numbers_for_a_group_and_digits_are_checked() -> None:
    starts = [EpisodeStart(row={}, group_seed=7, episode_seed=seed) for seed in range(2)]
    first, second = (asyncio.run(Calculator(start, CalculatorConfig()).reset()) for start in starts)
    assert first == second and re.fullmatch(r"[1-9]\d\d times [1-9]\d\d \?", first)
    with pytest.raises(ValueError, match=r"env\.digits=0: a factor has 1 to 9 digits"):
        SPEC.check(CalculatorConfig(digits=0))
