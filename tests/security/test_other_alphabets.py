"""Tests that digits and letters of other alphabets are not numbers or choices, although Python accepts them."""

from __future__ import annotations

from typing import Any

import pytest

from relax_core.config.plugin_types import plugin_config
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.registry import find_reward
from relax_core.rollout.judges.judge_prompts import verdict_parser


def scored(reward: str, response: str, answer: str, *, row: Any = None, **settings: Any) -> RewardOutput:
    spec = find_reward(reward)
    assert spec.score is not None
    row = {"answer": answer, **(row or {})}
    output = spec.score(
        RewardInput(response=response, stopped=True, answer=answer, row=row),
        plugin_config("reward", reward, settings, section="reward"),
    )
    assert isinstance(output, RewardOutput)
    return output


@pytest.mark.parametrize("number", ["４２", "٤٢", "४२", "𝟒𝟐", "4２"])
def test_other_digits_are_no_number(number: str) -> None:
    pytest.importorskip("pylatexenc")
    assert scored("dapo", "Answer: 42", number).reward is None
    assert scored("dapo", f"Answer: {number}", "42").reward == -1.0
    for reward, settings in (("math", {"rule": "boxed"}), ("deepscaler", {})):
        for response, answer in ((number, "42"), ("42", number), (f"{number}+0", "42")):
            assert scored(reward, f"</think>\\boxed{{{response}}}", answer, **settings).reward == 0.0
    assert verdict_parser("number 0..100")(number, False) is None
    assert verdict_parser(r"(?P<verdict>\S+)")(number, False) is None


def test_other_letters_are_no_choice() -> None:
    letters = {"valid_letters": ["R", "S"]}
    assert scored("gpqa", "the answer is \u017f", "S", row=letters).reward == 0.0  # the capital letter of "ſ" is S
    assert scored("gpqa", "the answer is\u00a0s", "S", row=letters).reward == 1.0  # a non-breaking space is a space


def test_a_long_label_of_dapo_is_refused_at_once() -> None:
    assert scored("dapo", "Answer: 1", "{" * 500_000).reward is None
    assert scored("dapo", "Answer: 42", "x = " * 50_000 + "42").reward == 1.0
