from __future__ import annotations

import pytest

from relax_core.contracts.reward import RewardInput, RewardOutput
from rewards.math import SPEC, MathConfig


def _score(response: str, *, answer: str, stopped: bool = True) -> RewardOutput:
    return SPEC.score(RewardInput(response=response, stopped=stopped, answer=answer, row={}), MathConfig())


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("42", "42"),
        ("The answer is 42.", "42"),
        ("first 41, then 42", "42"),
        (r"so \boxed{\frac{1}{2}}, and not 3", "1/2"),
        (r"half of it: $0.5$", r"\frac{1}{2}"),
        (r"\boxed{x^2+2x+1}", "(x+1)^2"),
        ("1,000", "1000"),
        ("72", "48 / 2 = 24 and 48 + 24 = 72 #### 72"),
    ],
)
def test_equal_answers_in_other_clothes_are_exact(response: str, answer: str) -> None:
    found = _score(response, answer=answer)
    assert (found.reward, found.exact) == (1.0, True)


@pytest.mark.parametrize("response", ["41", "", "no idea", r"\boxed{41} or 42", "42 or rather 43", "?!"])
def test_a_wrong_or_missing_answer_is_zero(response: str) -> None:
    found = _score(response, answer="42")
    assert (found.reward, found.exact) == (0.0, False)


@pytest.mark.parametrize(
    ("responses", "vote"),
    [
        (["The answer is 42.", "first 41, then 42", r"\boxed{42}"], "42"),
        (["1,000", "1000"], "1000"),
        ([r"so \boxed{\frac{1}{2}}", r"$\frac{1}{2}$", "$0.5$"], r"\frac{1}{2}"),
        (["no idea", "", "?!"], ""),
    ],
)
def test_the_same_answer_is_the_same_vote(responses: list[str], vote: str) -> None:
    assert {_score(response, answer="7").answer for response in responses} == {vote}
    assert _score("7", answer="7", stopped=False).answer == ""


def test_an_answer_at_the_token_limit_counts_only_when_it_is_boxed() -> None:
    assert _score("42", answer="42", stopped=False).reward == 0.0
    assert _score(r"\boxed{42} and", answer="42", stopped=False).reward == 1.0


def test_a_reference_that_cannot_be_read_gives_no_reward() -> None:
    got = _score("42", answer="")
    assert got.reward is None
    assert "reference answer ''" in got.reason
