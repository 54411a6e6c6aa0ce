"""Compares the estimates of pass@k and maj@k with an enumeration of every draw of k answers."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.contracts.reward import RewardOutput
from relax_core.data.eval_sets import wilson
from relax_core.rollout.eval_metrics import (
    Answer,
    accuracy,
    k_values,
    majority_at_k,
    majority_chance,
    mean_reward,
    pass_at_k,
    pass_chance,
    vote_of,
)


def answer(vote: str | None, *, exact: bool = False, reward: float | None = 0.0) -> Answer:
    return Answer(text=vote or "", exact=exact, reward=reward, vote=vote, cut=False, tokens=1)


def drawn_majority(answers: list[Answer], k: int) -> float:
    """Returns the share of draws with a correct majority. A tie counts as the share of correct answers in the tie."""
    right = {}
    for drawn_answer in answers:
        right.setdefault(drawn_answer.vote, drawn_answer.exact)
    won = []
    for draw in combinations(answers, k):
        votes = Counter(drawn_answer.vote for drawn_answer in draw if drawn_answer.vote is not None)
        most = max(votes.values(), default=0)
        tied = [vote for vote, count in votes.items() if count == most]
        won.append(fmean(right[vote] for vote in tied) if tied else 0.0)
    return fmean(won)


RIGHT = {"a": True, "b": False, "c": False, "d": True, None: False}
ANSWERS = st.lists(st.sampled_from(list(RIGHT)), min_size=1, max_size=9)


@given(votes=ANSWERS, data=st.data())
def test_maj_at_k_is_the_mean_over_all_draws(votes: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(votes)))
    answers = [answer(vote, exact=RIGHT[vote]) for vote in votes]
    assert majority_chance(answers, k) == pytest.approx(drawn_majority(answers, k), abs=1e-12)


@given(right=st.integers(0, 8), wrong=st.integers(0, 8), data=st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(right: int, wrong: int, data: st.DataObject) -> None:
    if right + wrong == 0:
        return
    k = data.draw(st.integers(1, right + wrong))
    draws = list(combinations([True] * right + [False] * wrong, k))
    assert pass_chance(right + wrong, right, k) == pytest.approx(fmean(map(any, draws)))


def test_pass_at_k_as_the_papers_own_program_gives_it() -> None:
    """Chen et al. (2021), figure 3: 1 − prod(1 − k / i for i in n − c + 1 … n)."""
    for answers, right, k in ((200, 3, 100), (200, 40, 10), (10, 9, 2)):
        product = 1.0
        for i in range(answers - right + 1, answers + 1):
            product *= 1.0 - k / i
        assert pass_chance(answers, right, k) == pytest.approx(1.0 - product)


def test_many_answers_are_no_trouble() -> None:
    answers = [answer(str(place % 40), exact=place % 40 == 0) for place in range(256)]
    assert 0.0 < majority_chance(answers, 64) < pass_chance(256, 7, 64) < 1.0
    assert majority_chance([answer("a", exact=True)] * 256, 128) == pytest.approx(1.0)


def test_a_greedy_evaluation_has_wilsons_interval() -> None:
    answers = [[answer("a", exact=place < 30)] for place in range(40)]
    found = accuracy(answers)
    assert found.value == 0.75
    assert (found.low, found.high) == pytest.approx(wilson(0.75, 40))


def test_intervals_follow_the_spread_of_the_prompts() -> None:
    """Half of the answers are correct: all answers to half of the prompts, or half of the answers to every prompt."""
    hard_and_easy = [[answer("a", exact=place < 20)] * 8 for place in range(40)]
    all_alike = [[answer("a", exact=place % 2 == 0) for place in range(8)]] * 40
    first, second = accuracy(hard_and_easy), accuracy(all_alike)
    assert first.value == second.value == 0.5
    assert (first.low, first.high) == pytest.approx(wilson(0.5, 40))  # eight equal answers count as one answer
    assert (second.low, second.high) == pytest.approx(wilson(0.5, 320))  # as narrow as for 320 independent answers
    assert pass_at_k(all_alike, 2).high <= 1.0
    assert majority_at_k(hard_and_easy, 8).value == 0.5


def test_the_mean_reward_leaves_out_what_has_none() -> None:
    found = mean_reward([[answer("a", reward=1.0), answer("a", reward=None)], [answer("a", reward=0.0)] * 2])
    assert found is not None and found.value == pytest.approx(1 / 3)
    assert found.low < 1 / 3 < found.high
    assert mean_reward([[answer("a", reward=None)]]) is None


@pytest.mark.parametrize(("samples", "expected"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (10, [2, 4, 8, 10])])
def test_ks(samples: int, expected: list[int]) -> None:
    assert k_values(samples) == expected


def test_equal_answers_have_one_vote() -> None:
    def vote(answer: str | None, *, exact: bool = False, text: str = "so 0.5") -> str | None:
        return vote_of(RewardOutput(reward=float(exact), exact=exact, answer=answer), text, label="1/2")

    assert vote("0.5", exact=True) == vote("\\frac{1}{2}", exact=True) == vote("50\\%", exact=True)
    for equal in (
        ("1/3", "2/6", "\\frac{1}{3}", "$\\dfrac{ 1 }{3}$"),
        ("1,000", "1000", "1000.0", "+1000"),
        ("a b", "a  b "),
    ):
        assert len({vote(written_form) for written_form in equal}) == 1, equal
    different = ("1/3", "3", "0.333", "1/0", "x", "1,3", "13", "-3", "0.5", "")
    assert len({vote(written_form) for written_form in different}) == len(different)
    assert vote("0.5") != vote("0.5", exact=True), "the reward may be stricter than arithmetic"
    assert vote(None) == "so 0.5" and vote(None, text="") is None is vote("")


def test_a_majority_of_equal_answers_wins() -> None:
    written = ("1/2", "0.5", "\\frac{1}{2}")
    outputs = [RewardOutput(reward=1.0, exact=True, answer=form) for form in written]
    outputs += [RewardOutput(reward=0.0, answer="3")] * 2
    answers = [answer(vote_of(output, "", label="1/2"), exact=output.exact) for output in outputs]
    assert majority_chance(answers, 5) == 1.0
