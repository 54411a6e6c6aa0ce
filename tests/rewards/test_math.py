from __future__ import annotations

import pytest

from relax_core.contracts.reward import RewardInput, RewardOutput
from rewards.math import SPEC, MathConfig


def _score(
    response: str, *, answer: str, stopped: bool = True, evaluate: bool = False, prompt: object = ""
) -> RewardOutput:
    given = RewardInput(response=response, stopped=stopped, answer=answer, row={"prompt": prompt})
    return SPEC.score(given, MathConfig(evaluate=evaluate))


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


@pytest.mark.parametrize("rule", ["math_verify", "boxed"])
@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"<think>I guess \boxed{72}</think> The answer is 5", 0.0),
        (r"<think>maybe \boxed{72}", 0.0),
        (r"<think>a</think>\boxed{7} <think> \boxed{72}", 0.0),
        ("<think>first \\boxed{24}, then 48+24</think>\nThe answer is \\boxed{72}.", 1.0),
        (r"thinking \boxed{1}</think>\boxed{72}", 1.0),
        (r"\boxed{3} no wait \boxed{72}", 1.0),
        (r"\boxed{72} and \boxed{3}", 0.0),
        (r"Put it in \boxed{}: \boxed{72}", 1.0),
        (r"\boxed{72} or \boxed{7", 0.0),
        (r"\fbox{72}, not 5", 1.0),
        (r"\boxed {72}", 1.0),
    ],
)
def test_the_last_box_behind_the_thinking_is_the_answer(response: str, reward: float, rule: str) -> None:
    if rule == "boxed":
        pytest.importorskip("pylatexenc")
    given = RewardInput(response=response, stopped=True, answer="72", row={})
    assert SPEC.score(given, MathConfig(rule=rule)).reward == reward


def test_an_answer_without_a_box_behind_the_thinking_counts() -> None:
    assert _score("<think>\\boxed{5} hmm no</think>\nThe answer is 72.", answer="72").reward == 1.0


@pytest.mark.parametrize(
    "response", [r"\boxed{28\%}", r"\boxed{28%}", "28%", r"\(28\%\)", r"\boxed{28\text{ percent}}"]
)
@pytest.mark.parametrize("label", ["28%", r"28\%", r"$28\%$", "28", "0.28"])
def test_percent_equals_percent_and_a_side_without_the_sign(response: str, label: str) -> None:
    assert _score(response, answer=label).reward == float(label != "0.28")
    assert _score(response, answer=label, evaluate=True).reward == 1.0


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"\boxed{28}", "28%", 1.0),
        (r"\boxed{0.28}", r"28\%", 0.0),
        ("8400%", "84", 0.0),
        (r"\boxed{2.8}", "28%", 0.0),
        (r"\boxed{29\%}", "28%", 0.0),
        (r"\boxed{0.5\%}", "50%", 0.0),
        (r"\boxed{10\%, 20\%}", "10%, 20%", 1.0),
        (r"\boxed{2 2/3}", "8/3", 1.0),
        (r"\boxed{2 2/3}", "22/3", 0.0),
        ("It takes 2 2/3 hours", "8/3", 1.0),
        ("2 2/3", "2", 0.0),
        (r"\boxed{-8/3}", "-2 2/3", 1.0),
        (r"\boxed{\$18.90}", r"\$18.90", 1.0),
        (r"\boxed{0.\overline{3}}", "1/3", 1.0),
        (r"\boxed{0.\overline{3}}", "0", 0.0),
        (r"\boxed{-1.2\overline{45}}", "-137/110", 1.0),
        (r"\boxed{3}", "1, 3", 0.0),
        (r"\boxed{\sqrt{4}}", r"\sqrt[3]{4}", 0.0),
    ],
)
def test_an_answer_is_read_as_no_other_number(response: str, label: str, reward: float) -> None:
    assert _score(response, answer=label).reward == reward


@pytest.mark.parametrize(
    ("found", "label", "equal"),
    [
        ("1/2004!", "1/2006!", False),
        ("2004!", "2004!", True),
        ("-2004!", "2004!", False),
        ("(10^{9})!", "(10^{9}+1)!", False),
        ("10^{10^{10}}", "10^{10^{10}}", True),
        ("10^{10^{10}}", "10^{10^{9}}", False),
        ("2^{1000000}", "4^{500000}", True),
        ("(-2)^{1000001}", "2^{1000001}", False),
        ("10^{-20}", "10^{-21}", False),
        ("x=10^{-20}", "10^{-21}", False),
        ("10^{-20}", r"\frac{1}{10^{20}}", True),
        ("1e-20", "1e-21", False),
        ("0.000000123", "0.000000124", False),
        (r"1.5 \times 10^{-30}", r"1.6 \times 10^{-30}", False),
        (r"\{10^{-20},1\}", r"\{10^{-21},1\}", False),
        ("0", "10^{-20}", False),
        ("e^{-50}", "e^{-51}", False),
        ("0.333333", "1/3", True),
        ("0.000333", "1/3000", True),
    ],
)
def test_numbers_differ_relatively_and_no_huge_one_is_computed(found: str, label: str, equal: bool) -> None:
    assert _score(f"\\boxed{{{found}}}", answer=label).exact == equal


@pytest.mark.parametrize(
    "response", ["72 + 12 =", "72+12", r"\boxed{72+12}", "12 * 7", r"\boxed{168/2}", r"$\frac{168}{2}$", "84 = 72 + 12"]
)
def test_an_expression_is_no_number(response: str) -> None:
    """The first run with real weights learned to answer a sum with its expression."""
    found = _score(response, answer="84", prompt="What is 72 + 12?")
    assert (found.reward, found.exact) == (0.0, False) and "written out" in found.why
    assert _score(response, answer="84", evaluate=True).reward == 1.0


@pytest.mark.parametrize(
    "response", ["17 + 67 = 84", "**84**", "84.", "84 dollars", r"\boxed{84^\circ}", r"\boxed{x = 84}", "$84.0$", "€84"]
)
def test_a_number_may_stand_with_its_unit_or_behind_its_expression(response: str) -> None:
    assert _score(response, answer="84", prompt="What is 17 + 67?").reward == 1.0


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"\boxed{-8, 2%, 1,000}", "1,000", 0.0),
        ("1,000 or -8", "1,000", 0.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{1, 3}", "1,3", 1.0),
        (r"\boxed{84 \text{ dollars}}", "84", 1.0),
    ],
)
def test_a_list_is_no_answer_to_a_number(response: str, label: str, reward: float) -> None:
    assert _score(response, answer=label).reward == reward


@pytest.mark.parametrize(
    ("prompt", "response", "reward"),
    [
        ("Factor $x^2 + 2x + 1$.", r"\boxed{x^2+2x+1}", 0.0),
        ([{"role": "user", "content": "Factor $x^2 + 2x + 1$."}], r"\boxed{x^2+2x+1}", 0.0),
        ("Factor the square.", r"\boxed{x^2+2x+1}", 1.0),
        ("Factor $x^2 + 2x + 11$.", r"\boxed{x^2+2x+1}", 1.0),
        ("Is it $(x+1)^2$ or $(x-1)^2$?", r"\boxed{(x+1)^2}", 1.0),  # the answer is the label itself
    ],
)
def test_an_expression_of_the_prompt_is_no_answer(prompt: object, response: str, reward: float) -> None:
    assert _score(response, answer="(x+1)^2", prompt=prompt).reward == reward
