"""Tests the final answer: responses that name only the label, and responses that contain it or evaluate to it."""

from __future__ import annotations

import time

import pytest

from relax_core.contracts.reward import RewardInput
from relax_core.rollout.rewards.wrong_answers import RIGHT_FORMS, AuditedRow, right_forms, wrong_answers
from rewards.final_answer import FinalAnswerConfig, check_row, score

PROMPT = "What is 72 + 12? Reply with just the number."


def reward_of(response: str, label: str = "84", *, stopped: bool = True) -> float | None:
    output = score(RewardInput(response=response, stopped=stopped, answer=label, row={}), FinalAnswerConfig())
    return output.reward


@pytest.mark.parametrize("number", range(len(RIGHT_FORMS)))
def test_the_label_in_each_usual_form_is_right(number: int) -> None:
    for label in ("84", "-7", "3.5"):
        assert reward_of(right_forms(label)[number], label) == 1.0, right_forms(label)[number]


@pytest.mark.parametrize(
    "response",
    [
        *("72 + 12 = 84", "\\boxed{72+12=84}", "84 dollars", "$84.00", "(84)", "It is 84!", "84.0", "1. 72\n2. 84"),
        *("72+12: 70+10=80, 2+2=4, 80+4 = 84", "The sum of 72 and 12 is 84.", "Final answer: **84**"),
    ],
)
def test_a_worked_answer_is_right(response: str) -> None:
    assert reward_of(response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        *(
            "",
            "72 + 12 =",
            "72+12",
            "\\boxed{72+12}",
            "12 * 7",
            "\\boxed{168/2}",
            "x<=84",
            "\\boxed{x<=84}",
            "83 or 84",
        ),
        *(
            "80 81 82 83 84",
            "80, 84",
            "between 80 and 84",
            "not 84",
            "80-84",
            "<think>84",
            "<think>84</think>",
            "8400%",
        ),
        *("\\boxed{83 \\text{ or } 84}", "84 + 0", "100 - 16", "Answer: 83 or 84", "[80, 84]", "84? No, it is 85."),
    ],
)
def test_what_only_holds_the_label_or_evaluates_to_it_is_wrong(response: str) -> None:
    assert reward_of(response) == 0.0


def test_no_made_wrong_answer_is_awarded() -> None:
    row = AuditedRow(prompt=PROMPT, label="84", others=["31", "77", "190"])
    awarded = [(family, text) for family, text in wrong_answers(row) if reward_of(text)]
    assert awarded == []


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("The capital is Paris.", "Paris", 1.0),
        ("paris", "Paris", 1.0),
        ("Paris or Rome", "Paris", 0.0),
        ("The answer is B.", "B", 1.0),
        ("A B C D", "B", 0.0),
        ("\\boxed{\\text{Paris}}", "Paris", 1.0),
        ("\\frac{1}{2}", "1/2", 1.0),
        ("0.5", "\\frac{1}{2}", 1.0),
        ("1,234", "1234", 1.0),
        ("the work\n#### 18", "a worked solution\n#### 18", 1.0),
    ],
)
def test_words_and_numbers_in_other_writings(response: str, label: str, expected: float) -> None:
    assert reward_of(response, label) == expected


def test_a_cut_response_counts_only_with_a_mark() -> None:
    assert reward_of("84", stopped=False) == 0.0
    assert reward_of("So \\boxed{84} and then", stopped=False) == 1.0


@pytest.mark.parametrize("label", ["", "x^2 + 1", "a sentence that has more than five words", "1, 3", "(2, 5)"])
def test_a_label_that_it_cannot_judge_has_no_reward(label: str) -> None:
    assert reward_of("84", label) is None
    with pytest.raises(ValueError, match="final_answer"):
        check_row({"answer": label}, FinalAnswerConfig())


@pytest.mark.parametrize("part", ["1", "a ", "<answer>", "\\boxed{", "answer:", " ", "1,", "$", "answer is ", "-"])
def test_a_long_response_costs_little(part: str) -> None:
    began = time.process_time()
    for label in ("84", "Paris"):
        reward_of(part * (1_000_000 // len(part)), label)
    assert time.process_time() - began < 2.0
