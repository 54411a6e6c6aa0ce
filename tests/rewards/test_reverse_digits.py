from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.contracts.reward import RewardInput, RewardOutput
from rewards.exact_match import SPEC as EXACT_MATCH
from rewards.reverse_digits import SPEC, ReverseDigitsConfig


def _score(response: str, *, stopped: bool = True, answer: str = "54321") -> RewardOutput:
    return SPEC.score(RewardInput(response=response, stopped=stopped, answer=answer, row={}), ReverseDigitsConfig())


@pytest.mark.parametrize(
    ("response", "stopped", "reward"),
    [
        ("54321", True, 1.0),
        ("54311", True, 0.84),  # 0.8 * 4/5 + 0.2
        ("5432", True, 0.8),  # 0.8 * 4/5 + 0.2 * 4/5
        ("543210", True, 0.96),  # 0.8 + 0.2 * 4/5
        ("54321", False, 0.96),  # did not end: one character too long
        ("54321999", False, 0.84),  # 0.8 + 0.2 * max(0, 1 - 4/5)
        ("", True, 0.0),
        ("99999", True, 0.2),
    ],
)
def test_rewards_by_hand(response: str, stopped: bool, reward: float) -> None:
    got = _score(response, stopped=stopped)
    assert got.reward == pytest.approx(reward)
    assert got.exact == (reward == 1.0)


@pytest.mark.parametrize("score", [SPEC.score, EXACT_MATCH.score])
@pytest.mark.parametrize("answer", ["543", "543.end"])
def test_a_stop_string_is_part_of_the_answer_or_follows_it(score: Any, answer: str) -> None:
    given_ = RewardInput(response="543.end", stopped=True, answer=answer, row={}, stop_string=".end")
    assert score(given_, None).reward == 1.0


@given(response=st.text("0123456789<pad>", max_size=12), stopped=st.booleans())
@settings(deadline=None)
def test_one_means_exact_and_nothing_else(response: str, stopped: bool) -> None:
    got = _score(response, stopped=stopped)
    assert got.reward is not None
    assert 0.0 <= got.reward <= 1.0
    assert got.exact == (response == "54321" and stopped) == (got.reward == 1.0)
